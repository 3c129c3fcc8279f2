"""Tensor maps and clusters on the host's side: what the driver is told, and how a plan states them."""
from __future__ import annotations

import ctypes
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from bulk_model import need_bulk_copies
from simt_launch import KERNELS

from cuattn import gpu_driver, tensor_map
from cuattn.binding import Binding, array_of, repeatable
from cuattn.kernels import ROWS
from cuattn.kernels.base import Launch, Plan, TileMap
from cuattn.kernels.shapes import AttentionShape
from cuattn.machine import DeviceError, Tensor


@pytest.fixture
def driver(monkeypatch):
    """A CUDA driver that notes what it is told, and fails where `code` is not 0."""

    class Driver:
        def __init__(self):
            self.calls, self.code = [], 0

        def cuTensorMapEncodeTiled(self, out, *words):
            values = [list(word) if hasattr(word, "__len__") else getattr(word, "value", word)
                      for word in words]
            self.calls.append(("encode", ctypes.addressof(out._obj) % 64, *values))
            out._obj[:] = b"\x07" * 128
            return self.code

        def cuTensorMapReplaceAddress(self, out, address):
            self.calls.append(("replace", ctypes.addressof(out._obj) % 64, address.value))
            return self.code

        def cuLaunchKernelEx(self, config, function, arguments, extra):
            c = config._obj
            attribute = c.attributes[0]
            self.calls.append(("launch", [*c.grid, *c.block, c.smem_bytes], c.stream, c.attribute_count,
                               attribute.id, [*attribute.value][:3], function.value, arguments.value, extra))
            return self.code

        def cuGetErrorString(self, code, text):
            text._obj.value = b"invalid argument"
            return 0

    made = Driver()
    monkeypatch.setattr(gpu_driver, "_driver", lambda: made)
    return made


def tensor(shape, strides=None, itemsize=2, address=0x1000) -> Tensor:
    if strides is None:
        strides = tuple(int(np.prod(shape[i + 1:])) for i in range(len(shape)))
    return Tensor(address, tuple(shape), tuple(strides), "float16", itemsize, None)


def test_what_the_driver_is_told(driver):
    made = tensor_map.describe(tensor((2, 300, 4, 64)), (1, 128, 1, 64), 128)
    encoded = gpu_driver.encode(made)
    assert encoded.packed() == b"\x07" * 128 and encoded.tile_bytes == 128 * 64 * 2
    assert driver.calls == [("encode", 0, 1, 4, 0x1000, [64, 4, 300, 2], [128, 512, 512 * 300],
                             [64, 1, 128, 1], [1, 1, 1, 1], 0, 3, 2, 0)]


def test_a_dimension_of_one_gets_strides_that_the_hardware_takes():
    strides = tensor_map.describe(tensor((1, 1, 40), (0, 0, 1)), (1, 1, 8), 0).strides
    assert strides == (80, 80) and all(stride % 16 == 0 for stride in strides)
    made = tensor_map.describe(tensor((1, 37, 1, 24), (0, 24, 0, 1)), (1, 2, 1, 8), 0)
    assert made.strides == (48, 48, 48 * 37)


def test_an_empty_array_has_a_map_of_zeros(driver, cpu):
    assert gpu_driver.encode(tensor_map.describe(tensor((0, 64)), (8, 64), 128)).packed() == bytes(128)
    assert not driver.calls
    assert cpu.tensor_map(cpu.empty((0, 64), np.uint16), (8, 64), 128).packed() == bytes(128)


@pytest.mark.parametrize("strides, address", [((0, 0, 0), 0), ((-64, -64, 1), 0x1000), ((64, 60, 1), 0x1002)])
def test_an_empty_array_may_lie_anywhere(driver, strides, address):
    made = tensor_map.describe(tensor((3, 0, 64), strides, address=address), (1, 8, 64), 128)
    assert gpu_driver.encode(made).packed() == tensor_map.for_host(made).packed() == bytes(128)
    assert not driver.calls


def test_what_the_driver_refuses_is_a_sentence(driver):
    driver.code = 1
    with pytest.raises(DeviceError, match=r"cuTensorMapEncodeTiled: invalid argument \(CUDA error 1\)"):
        gpu_driver.encode(tensor_map.describe(tensor((16, 64)), (8, 64), 128))


def test_a_repeated_call_moves_the_array(driver):
    buffer = gpu_driver.aligned_buffer(bytes(range(128)))
    assert bytes(buffer) == bytes(range(128)) and ctypes.addressof(buffer) % 64 == 0
    gpu_driver.replace_address(buffer, 0, 0x2000)
    assert driver.calls == [("replace", 0, 0x2000)]


def test_a_launch_in_clusters(driver):
    launch = gpu_driver.ClusterLaunch(0x55, (8, 3, 2), 384, 200000, 2)
    launch(7, 0x99)
    assert driver.calls == [("launch", [8, 3, 2, 384, 1, 1, 200000], 7, 1, 4, [2, 1, 1], 0x55, 0x99, None)]


def test_a_plan_states_maps_as_data(cpu, monkeypatch):
    """The binding makes tensor maps of them, of the operation's own arrays, and hands the cluster on."""
    flash, noted = ROWS["flash"], []
    maps = {"k_tiles": TileMap("k", (1, 64, 1, 64), 128)}

    def plan(shape, device, overrides=None):
        first = flash.plan(shape, device, overrides).launches[0]
        return Plan((dataclasses.replace(first, cluster=2, maps=maps),), {})

    def arguments(shape, plan, t):
        (launch,) = plan.launches
        return [[("q", t["q"]), *launch.maps.items()]]

    monkeypatch.setattr(cpu, "prepare", lambda *words: noted.append(words))
    row = dataclasses.replace(flash, plan=plan, arguments=arguments)
    q, k, v = (cpu.upload(np.zeros((1, n, 2, 64), np.float16)) for n in (32, 48, 48))
    binding = Binding(q=q, k=k, v=v)
    planned = binding.planned(row, AttentionShape(1, 2, 2, 32, 48, 64, "float16"), None, (), {})
    ((*_, args, lane, cluster),) = noted
    assert (lane, cluster) == (0, 2) and [name for name, _ in args] == ["q", "k_tiles"]
    made = args[1][1]
    assert made == cpu.tensor_map(binding.tensors["k"], (1, 64, 1, 64), 128)
    assert array_of(made) is binding.tensors["k"] and repeatable(planned)


@pytest.mark.parametrize("cluster", [1, 2])
def test_prim_a_planned_copy(machine, randn, cluster):
    """A row whose kernel copies its queries by tiles, from the plan to the result, on either machine."""
    need_bulk_copies(machine)
    tile = (1, 8, 1, 64)
    maps = {"from": TileMap("q", tile, 128), "to": TileMap("o", tile, 128)}

    def plan(shape, device, overrides=None):
        grid = (-(-shape.m // 16) * 2, shape.h, shape.b)
        file = str(KERNELS / "bulk.cu")
        return Plan((Launch(file, "copy_tiles", grid, 32, 1024 + 64, {}, cluster=cluster, maps=maps),), {})

    def arguments(shape, plan, t):
        return [list(plan.launches[0].maps.items())]

    row = dataclasses.replace(ROWS["flash"], plan=plan, constants={}, choices={}, arguments=arguments)
    q = machine.upload(randn(2, 41, 3, 64))
    binding = Binding(q=q)
    o = binding.output("o", q.shape, "float16")
    binding.planned(row, AttentionShape(2, 3, 3, 41, 41, 64, "float16"), None, (o,), {}).run()
    np.testing.assert_array_equal(machine.download(o), machine.download(q))


def test_a_launch_without_them_is_as_before():
    launch = Launch("x.cu", "x", (1, 1, 1), 32, 0, {})
    assert launch.cluster == 1 and not launch.maps


def test_a_gpu_launch_keeps_maps_where_the_driver_can_change_them(driver):
    pytest.importorskip("cupy_backends", reason="CuPy is not installed here")
    from cuattn.gpu import GpuLaunch

    made, nothing = (gpu_driver.encode(tensor_map.describe(tensor((n, 64)), (8, 64), 128)) for n in (16, 0))
    stream, function = SimpleNamespace(ptr=7), SimpleNamespace(ptr=0x55)
    stay, buffer = GpuLaunch(lambda: stream, function, (4, 1, 1), 32, 0, [("tiles", nothing)]).slot(0)
    stay(buffer, 0, 0x4000)
    assert bytes(buffer) == bytes(128)
    launch = GpuLaunch(lambda: stream, function, (4, 1, 1), 32, 0, [("n", np.int32(3)), ("tiles", made)], 2)
    move, buffer = launch.slot(1)
    move(buffer, 0, 0x4000)
    launch()
    assert bytes(buffer) == made.packed() and ctypes.addressof(buffer) % 64 == 0
    assert [call[0] for call in driver.calls] == ["encode", "replace", "launch"]
    assert driver.calls[1:2] == [("replace", 0, 0x4000)]
