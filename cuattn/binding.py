"""An operation bound to its arrays: the plan and binaries once a shape, the launches once a call.

`Binding` turns a call's arrays into tensors of one machine and makes a `Planned`, whose `run` only launches.
`Repeat` keeps what a GPU call of the same signature decided, so that the next one only allocates its results,
sets addresses and launches.
"""
from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from cuattn import compile as compiler
from cuattn import contract, tuned
from cuattn.kernels.base import Cost, Plan, Row, TileMap, Unsupported
from cuattn.kernels.base import resolve as check_constants
from cuattn.machine import Machine, Tensor, open_machine


@lru_cache(maxsize=1024)
def _plan(row: Row, shape, device, constants: tuple) -> Plan:
    """The plan, once for each shape, device and choice of constants."""
    if not row.runs_on(device.arch):
        raise Unsupported(f"kernel '{row.name}' runs on {', '.join(row.archs)}, and this device is "
                          f"{device.arch}; choose another")
    return row.plan(shape, device, dict(constants))


def _chosen_plan(row: Row, shape, device, constants: dict | None) -> Plan:
    """The plan with the caller's constants; without any, with the tuned ones; without those, with its own.

    A tuned set was timed as a whole, so it is never mixed with what the caller gives.
    """
    check_constants(row.constants, constants)  # before the look-up, which takes 64.0 for 64
    if not constants and (best := tuned.constants(row, shape, device)):
        try:
            return _plan(row, shape, device, tuple(sorted(best.items())))
        except Unsupported:
            pass  # the class holds this shape, and it is one that the constants do not suit
    return _plan(row, shape, device, tuple(sorted((constants or {}).items())))


def resolve(row: Row, shape, device, constants: dict | None) -> tuple[Plan, tuple]:
    """The plan and the binary of each launch; a source edited since the last call is compiled again."""
    plan = _chosen_plan(row, shape, device, constants)
    built: dict[tuple, Any] = {}
    for launch in plan.launches:
        key = (launch.file, launch.entry, id(launch.constants))
        if key not in built:
            built[key] = compiler.build(launch.file, launch.entry, launch.constants, device.arch)
    return plan, tuple(built[launch.file, launch.entry, id(launch.constants)] for launch in plan.launches)


@dataclass
class Planned:
    """An operation bound to its arrays: `run()` only launches.

    On the CPU machine plain NumPy arrays are copied in before and out after each run; arrays made by the
    machine are used where they are.

    Parameters
    ----------
    row, shape, plan
        The kernel, the problem, and what was decided.
    source_hash : str
        12 hex digits of the kernel's source.
    outputs : tuple
        What `run` returns.
    tensors : dict
        Every array by its name, inputs, outputs and scratch; kept alive as long as this object.
    """

    row: Row
    shape: Any
    plan: Plan
    machine: Machine
    outputs: tuple
    builds: tuple
    tensors: dict[str, Tensor]
    launches: list
    arguments: list  # of each launch: [(name in the kernel, value)]
    made: dict[str, tuple] = field(default_factory=dict)
    lengths: Any = None
    copies_in: list = field(default_factory=list)
    copies_out: list = field(default_factory=list)
    caller: Any = None  # an array whose kind says which stream is current

    def run(self) -> Any:
        """Launches, and returns the outputs."""
        for inside, outside in self.copies_in:
            np.copyto(inside, outside)
        with self.machine.stream(self.caller), self.machine.lanes(self.plan.lanes):
            for launch in self.launches:
                launch()
        for inside, outside in self.copies_out:
            np.copyto(outside, inside)
        return self.outputs

    def cost(self) -> Cost:
        """The closed forms; where they depend on lengths or offsets, these are read back from the device."""
        def host(array) -> list[int]:
            return [int(x) for x in self.machine.download(array)]

        lengths = self.lengths
        if lengths is not None:
            lengths = [host(x) for x in lengths] if isinstance(lengths, tuple) else host(lengths)
        return self.row.cost(self.shape, self.plan, lengths)

    @property
    def source_hash(self) -> str:
        return "+".join(dict.fromkeys(built.source_hash for built in self.builds))

    @property
    def build_info(self) -> dict[str, int]:
        """The largest register count and the sum of spilled bytes over the launches.

        Empty on the CPU machine.
        """
        if any(built.registers is None for built in self.builds):
            return {}
        return {"registers": max((b.registers for b in self.builds), default=0),
                "spill_bytes": sum(b.spill_bytes for b in self.builds)}


def _reachable(name: str, x) -> None:
    """Refuses what no kernel can read, and PyTorch tensors whose gradient would silently be lost."""
    if getattr(x, "requires_grad", False) and sys.modules["torch"].is_grad_enabled():
        raise contract.refuse(name, "a tensor without gradient, for there is no backward pass",
                              "requires_grad=True", "detach it or call under torch.no_grad()")
    if not (getattr(x, "is_cuda", False) or hasattr(x, "__cuda_array_interface__")):
        raise contract.refuse(name, "a NumPy, CuPy or CUDA PyTorch array", type(x).__name__, "convert it")


class Binding:
    """Collects a call's arrays as tensors of one machine, with the copies that plain NumPy arrays need."""

    def __init__(self, **arrays):
        foreign = [name for name, x in arrays.items() if not isinstance(x, np.ndarray)]
        if foreign and len(foreign) < len(arrays):
            inside = next(name for name in arrays if name not in foreign)
            raise contract.refuse(foreign[0], f"a NumPy array as {inside} is",
                                  type(arrays[foreign[0]]).__name__, "bring all arrays to one side")
        for name in foreign:
            _reachable(name, arrays[name])
        self.first = next(iter(arrays.values()))
        self.machine = open_machine("gpu" if foreign else "cpu")
        for name in foreign:
            self._on_this_gpu(name, arrays[name])
        self.copies_in, self.copies_out = [], []
        self.made: dict[str, tuple] = {}  # outputs and scratch that the caller did not bring
        self.tensors: dict[str, Tensor] = {name: self._input(x) for name, x in arrays.items()}

    def _host(self) -> bool:
        return self.machine.name == "cpu"

    def _on_this_gpu(self, name: str, x) -> None:
        index = self.machine.index_of(x)
        if index != self.machine.index:
            raise contract.refuse(name, f"an array on GPU {self.machine.index}, the one this process opened",
                                  f"one on GPU {index}", "move it there")

    def _input(self, x) -> Tensor:
        if self._host() and not self.machine.owns(x):
            inside = self.machine.empty(x.shape, x.dtype)
            self.copies_in.append((inside, x))
            x = inside
        return self.machine.tensor(x)

    def output(self, name: str, shape, dtype: str, given=None):
        """The array an output goes to, the caller's or a new one; binds it under `name`."""
        if given is None:
            self.made[name] = (tuple(shape), dtype)
        elif self._host() != isinstance(given, np.ndarray):
            raise contract.refuse("out", f"an array of q's kind, {type(self.first).__name__}",
                                  type(given).__name__, "give one beside q")
        elif self._host() and not given.flags.writeable:
            raise contract.refuse("out", "an array that may be written", "a read-only one", "give another")
        elif not self._host():
            _reachable("out", given)
            self._on_this_gpu("out", given)
        if given is None and not self._host():
            given = self.machine.like(self.first, shape, dtype)
        if given is None or (self._host() and not self.machine.owns(given)):
            inside = self.machine.empty(shape, dtype)
            if given is not None:
                contract.same("out", (tuple(given.shape), given.dtype.name), "the result",
                              (tuple(shape), dtype))
                self.copies_out.append((inside, given))
            self.tensors[name] = self.machine.tensor(inside)
            return inside if given is None else given
        self.tensors[name] = self.machine.tensor(given)
        contract.same("out", (self.tensors[name].shape, self.tensors[name].dtype), "the result",
                      (tuple(shape), dtype))
        return given

    def source(self, name: str):
        """The caller's own array behind an input."""
        inside = self.tensors[name].array
        return next((out for copy, out in self.copies_in if copy is inside), inside)

    def values(self, name: str) -> np.ndarray:
        """An input's contents on the host."""
        return self.machine.download(self.source(name))

    def inout(self, name: str) -> None:
        """An input that the kernel also writes: copied back where it was copied in."""
        inside = self.tensors[name].array
        self.copies_out += [pair for pair in self.copies_in if pair[0] is inside]

    def _argument(self, kernel: str, value):
        """A plan's argument as the machine takes it: a tile map becomes a tensor map of its array."""
        if not isinstance(value, TileMap):
            return value
        try:
            return self.machine.tensor_map(self.tensors[value.array], value.box, value.swizzle)
        except ValueError as error:
            why = str(error).removeprefix("tensor map: ").removeprefix("array: ")
            raise Unsupported(f"{kernel}: {value.array}: {why}, or choose another kernel") from None

    def planned(self, row: Row, shape, constants, outputs, scalars, lengths=None) -> Planned:
        """Resolves plan and binaries, makes the scratch, and prepares every launch that has work."""
        machine = self.machine
        plan, builds = resolve(row, shape, machine.device, constants)
        for name, (extent, dtype) in plan.scratch.items():
            array = self.output(name, extent, dtype)
            if name in plan.zeroed:
                with machine.stream(self.first):
                    machine.clear(array)
        bound = [[(name, self._argument(row.name, value)) for name, value in args]
                 for args in row.arguments(shape, plan, {**self.tensors, **scalars})]
        work = [(launch, built, args) for launch, built, args in zip(plan.launches, builds, bound)
                if all(launch.grid)]
        launches = [machine.prepare(built, launch.grid, launch.block, launch.smem_bytes, args, launch.lane,
                                    launch.cluster)
                    for launch, built, args in work]
        return Planned(row, shape, plan, machine, outputs, builds, self.tensors, launches,
                       [args for *_, args in work], self.made, lengths, self.copies_in, self.copies_out,
                       self.first)


def array_of(value) -> Tensor | None:
    """The array behind a launch's argument; None of a number."""
    return value if isinstance(value, Tensor) else getattr(value, "tensor", None)


def repeatable(planned: Planned) -> bool:
    """Whether every array its launches use is the operation's own, so that a later call can set its address."""
    own = {id(t) for t in planned.tensors.values()}
    used = (array_of(value) for args in planned.arguments for _, value in args)
    return all(id(tensor) in own for tensor in used if tensor is not None)


class Repeat:
    """What GPU calls of one signature share.

    A call sets the addresses in the prepared launches and launches them. The signature must hold everything
    that the checks and the plan read: shapes, strides, dtypes, alignment, options.
    """

    def __init__(self, planned: Planned, names: tuple[str, ...], returns: tuple[str, ...]):
        self.machine, self.launches, self._lanes = planned.machine, planned.launches, planned.plan.lanes
        self._lock = threading.Lock()  # the launches' argument buffers are shared
        self._made = tuple(planned.made.values())
        self._returned = [list(planned.made).index(name) for name in returns]
        self._zeroed = [list(planned.made).index(name) for name in planned.plan.zeroed]
        # NOTE: by identity; a kernel's name for an argument may be another than the operation's (o, or a part
        # of it).
        self._slots = [
            [launch.slot(i) for launch, args in zip(planned.launches, planned.arguments)
             for i, (_, value) in enumerate(args) if array_of(value) is planned.tensors[name]]
            for name in (*names, *planned.made)
        ]

    def call(self, *arrays) -> list:
        """The outputs of the operation on these arrays, which have the signature."""
        make, address = self.machine.maker(arrays[0])
        with self.machine.stream(arrays[0]):
            made = [make(shape, dtype) for shape, dtype in self._made]
            for i in self._zeroed:
                self.machine.clear(made[i])
            with self._lock:
                for slots, x in zip(self._slots, (*arrays, *made)):
                    for set_address, buffer in slots:
                        set_address(buffer, 0, address(x))
                with self.machine.lanes(self._lanes):
                    for launch in self.launches:
                        launch()
        return [made[i] for i in self._returned]


repeats: dict[tuple, Repeat] = {}
REMEMBERED = 1024  # signatures; beyond, all are forgotten


def remember(key: tuple, repeat: Repeat) -> None:
    """Keeps what the next call of this signature can reuse."""
    if len(repeats) >= REMEMBERED:
        repeats.clear()
    repeats[key] = repeat


def signature(*arrays) -> tuple | None:
    """What checks and plans read of GPU arrays; None for other arrays, whose calls are not repeated."""
    kind = type(arrays[0])
    if len({type(x) for x in arrays}) > 1:
        return None
    if kind.__module__ == "cupy":
        return tuple([(x.shape, x.strides, x.dtype.char, x.data.ptr % contract.WORD, x.data.device_id)
                      for x in arrays])
    if hasattr(arrays[0], "data_ptr") and all(x.is_cuda and not x.requires_grad for x in arrays):
        return tuple([(x.shape, x.stride(), x.dtype, x.data_ptr() % contract.WORD, x.device.index)
                      for x in arrays])
    return None
