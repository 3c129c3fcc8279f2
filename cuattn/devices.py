"""What a plan may know about a device, and a table of cards with their datasheet rates.

Rates are the vendor's: dense (no sparsity), float32 accumulation, at boost clock; memory is nominal. They are
upper bounds to compare with, never measurements; where the suite `ceilings` has been run, its measured rates
replace them.
"""
from __future__ import annotations

import re
from dataclasses import dataclass, replace

from cuattn.machine import MachineUnavailable

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
OLDEST = 80  # cp.async and bfloat16 mma.sync arrive with this architecture


@dataclass(frozen=True)
class Device:
    """A device as plans and reports see it.

    Parameters
    ----------
    name : str
        The table's name, or what the driver says for a card that is not in it.
    arch : str
        Compile target: "sm_80", …, "sm_90a", "sm_120", or "cpu".
    sms : int
        Streaming multiprocessors.
    smem_per_block, smem_per_sm : int
        Bytes of shared memory one thread block may ask for, and that one multiprocessor has.
    l2_bytes, memory_bytes : int
        Bytes.
    bandwidth_gbps : float or None
        Datasheet memory bandwidth in 10⁹ bytes/s; None where unknown.
    bf16_tflops : float or None
        Datasheet dense bfloat16 tensor rate in 10¹² flop/s; None where unknown or absent.
    registers_per_sm : int
        32-bit registers.
    """

    name: str
    arch: str
    sms: int
    smem_per_block: int
    smem_per_sm: int
    l2_bytes: int
    memory_bytes: int
    bandwidth_gbps: float | None = None
    bf16_tflops: float | None = None
    registers_per_sm: int = 65536

    @property
    def arch_number(self) -> int:
        """80, 90, 120, …; 0 for the CPU machine."""
        return 0 if self.arch == "cpu" else int(self.arch[3:].rstrip("a"))


# The CPU machine takes the largest shared memory of any card so that every kernel fits, and few
# multiprocessors: a plan that fills the device then still splits a small problem, but not into more parts
# than a laptop runs quickly.
CPU = Device("cpu", "cpu", 8, 227 * KIB, 228 * KIB, 4 * MIB, 2 * GIB)


def _card(name, arch, sms, smem, l2_mib, memory_gib, gbps, tflops) -> Device:
    # From sm_80 on, the driver keeps 1 KiB of each block's shared memory for itself.
    reserved = 0 if arch == "sm_75" else KIB
    per_block, per_sm = smem * KIB - reserved, smem * KIB
    return Device(name, arch, sms, per_block, per_sm, l2_mib * MIB, memory_gib * GIB, gbps, tflops)


#             name        arch     SMs  smem  L2  memory  GB/s   TFLOP/s
#                                        KiB  MiB    GiB
CARDS: dict[str, Device] = {
    card.name: card
    for card in (
        _card("T4",       "sm_75",  40,   64,   4,   16,  320.0,  None),
        _card("RTX 3090", "sm_86",  82,  100,   6,   24,  936.0,  71.0),
        _card("RTX 4090", "sm_89", 128,  100,  72,   24, 1008.0, 165.2),
        _card("RTX 5090", "sm_120", 170, 100,  96,   32, 1792.0, 209.5),
        _card("A100-40",  "sm_80", 108,  164,  40,   40, 1555.0, 312.0),
        _card("A100-80",  "sm_80", 108,  164,  40,   80, 2039.0, 312.0),
        _card("L4",       "sm_89",  58,  100,  48,   24,  300.0, 121.0),
        _card("L40S",     "sm_89", 142,  100,  96,   48,  864.0, 362.0),
        _card("H100",     "sm_90a", 132, 228,  50,   80, 3350.0, 989.0),
        _card("H200",     "sm_90a", 132, 228,  60,  141, 4800.0, 989.0),
    )
}

# A smaller sibling carries its big sibling's number; these words in the driver's name tell them apart.
_SIBLINGS = {"TI", "D", "LAPTOP", "MAX", "MOBILE", "PCIE", "NVL", "MIG", "SUPER"}
_TYPICAL = {
    "sm_75": "T4", "sm_80": "A100-80", "sm_86": "RTX 3090", "sm_89": "RTX 4090", "sm_90a": "H100",
    "sm_120": "RTX 5090",
}


def _words(name: str) -> set[str]:
    return set(re.findall(r"[A-Z0-9]+", name.upper()))


def lookup(name: str) -> Device | None:
    """The card of that name, or None if the table has none.

    Parameters
    ----------
    name : str
        The table's own name in any case ("h200", "rtx-4090", "cpu"), or the driver's ("NVIDIA
        A100-SXM4-80GB"). Siblings with other rates (Ti, Laptop, PCIe, NVL, MIG slices) are not taken for the
        card they are named after.
    """
    words = _words(name)
    if words == {"CPU"}:
        return CPU
    if "A100" in words:
        # The PCIe A100 is the same chip with about the same bandwidth (within 6 %); only a MIG slice differs.
        forty = "40" in words or "40GB" in words
        eighty = "80" in words or "80GB" in words
        return None if "MIG" in words or forty == eighty else CARDS["A100-40" if forty else "A100-80"]
    if words & _SIBLINGS:
        return None
    for card in CARDS.values():
        wanted = _words(card.name)
        if wanted <= words or (wanted - {"RTX"} == words):
            return card
    return None


def for_arch(arch: str) -> Device:
    """A typical card of that architecture, with its limits: what a compile test plans for.

    Raises
    ------
    ValueError
        If no card in the table has that architecture.
    """
    if arch == "cpu":
        return CPU
    if arch == "sm_90":  # the same chips without the architecture-specific instructions
        return replace(CARDS["H100"], arch="sm_90")
    if arch not in _TYPICAL:
        known = ", ".join(["cpu", *_TYPICAL, "sm_90"])
        raise ValueError(f"arch: expected one of {known}, got {arch!r}; name one of these")
    return CARDS[_TYPICAL[arch]]


def from_driver(
    name: str, compute_capability: tuple[int, int], *, sms: int, smem_per_block: int, smem_per_sm: int,
    l2_bytes: int, memory_bytes: int, registers_per_sm: int = 65536,
) -> Device:
    """The card that is really there: limits as its driver reports them, rates from the table if it is in it.

    Compute capability 9.0 becomes "sm_90a", because only that target has wgmma and setmaxnreg.
    """
    major, minor = compute_capability
    arch = "sm_90a" if (major, minor) == (9, 0) else f"sm_{major}{minor}"
    known = lookup(name)
    return Device(
        known.name if known else name, arch, sms, smem_per_block, smem_per_sm, l2_bytes, memory_bytes,
        known.bandwidth_gbps if known else None, known.bf16_tflops if known else None, registers_per_sm,
    )


def require_supported(device: Device) -> Device:
    """`device` itself, if the kernels can run on it.

    Raises
    ------
    MachineUnavailable
        For a card older than sm_80, which has neither cp.async nor bfloat16 tensor instructions.
    """
    if device.arch != "cpu" and device.arch_number < OLDEST:
        raise MachineUnavailable(
            f"device: expected a GPU of architecture sm_80 or later, got {device.name} ({device.arch}), "
            "which has no cp.async; use a newer card, or the CPU machine with machine='cpu'"
        )
    return device
