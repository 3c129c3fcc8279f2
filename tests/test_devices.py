"""The table of cards: names are known, siblings are not mistaken, limits fit the architecture."""
import pytest

from cuattn import devices
from cuattn.devices import CARDS, CPU, for_arch, from_driver, lookup, require_supported
from cuattn.machine import MachineUnavailable


@pytest.mark.parametrize("name, card", [
    ("NVIDIA H200", "H200"), ("h200", "H200"), ("NVIDIA H100 80GB HBM3", "H100"),
    ("NVIDIA A100-SXM4-40GB", "A100-40"), ("NVIDIA A100-SXM4-80GB", "A100-80"), ("a100-80", "A100-80"),
    ("NVIDIA A100 80GB PCIe", "A100-80"), ("Tesla T4", "T4"), ("NVIDIA L4", "L4"), ("NVIDIA L40S", "L40S"),
    ("NVIDIA GeForce RTX 3090", "RTX 3090"), ("rtx-4090", "RTX 4090"), ("4090", "RTX 4090"),
    ("NVIDIA GeForce RTX 5090", "RTX 5090"), ("cpu", "cpu"),
])
def test_names(name, card):
    assert lookup(name).name == card


@pytest.mark.parametrize("name", [
    "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 4090 D",
    "NVIDIA L40", "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA GH200 480GB",
    "A100", "",
])
def test_siblings_and_strangers_are_not_in_the_table(name):
    assert lookup(name) is None


def test_every_card_is_found_by_its_own_name():
    assert all(lookup(name) is card and card.name == name for name, card in CARDS.items())


@pytest.mark.parametrize("arch, kib", [
    ("sm_80", 163), ("sm_86", 99), ("sm_89", 99), ("sm_90", 227), ("sm_90a", 227), ("sm_120", 99),
])
def test_shared_memory_limits(arch, kib):
    device = for_arch(arch)
    assert device.arch == arch and device.smem_per_block == kib * 1024 < device.smem_per_sm
    assert all(card.smem_per_block == device.smem_per_block for card in CARDS.values() if card.arch == arch)


def test_for_arch_names_what_it_knows():
    assert for_arch("cpu") is CPU and CPU.arch_number == 0 and CPU.bandwidth_gbps is None
    with pytest.raises(ValueError, match="expected one of cpu, .*sm_90a.*, got 'sm_70'"):
        for_arch("sm_70")


def test_the_cpu_machine_has_room_for_every_kernel():
    assert CPU.smem_per_block == max(card.smem_per_block for card in CARDS.values())


def test_cards_older_than_sm_80_are_refused_in_one_sentence():
    with pytest.raises(MachineUnavailable, match="sm_80 or later, got T4 .sm_75., .*use a newer card"):
        require_supported(CARDS["T4"])
    for card in [*CARDS.values(), CPU]:
        if card.name != "T4":
            assert require_supported(card) is card


def test_the_driver_says_the_limits_and_the_table_the_rates():
    limits = dict(sms=130, smem_per_block=232448, smem_per_sm=233472, l2_bytes=1, memory_bytes=2)
    device = from_driver("NVIDIA H200", (9, 0), **limits)
    assert (device.name, device.arch, device.sms, device.memory_bytes) == ("H200", "sm_90a", 130, 2)
    assert device.bandwidth_gbps == 4800 and device.arch_number == 90
    device = from_driver("NVIDIA Unknown 1", (12, 0), **limits)
    assert (device.name, device.arch, device.bandwidth_gbps) == ("NVIDIA Unknown 1", "sm_120", None)
    assert devices.require_supported(device) is device
