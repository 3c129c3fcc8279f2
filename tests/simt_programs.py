"""Random programs for the CPU machine: what they are, what they compute, and as what CUDA they are written.

A program is a straight line of instructions. In each of them some lanes of each warp take part, the others go
past. `settle` turns instructions as they are drawn into a program free of races, and computes what it must
leave behind: all threads in lock-step, in NumPy. The kernels are in `simt_kernels/program.cuh` and
`interpreter.cu`.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from simt_clocks import Clocks

LANES, REGISTERS, SHARED_BYTES, WARPS = 32, 8, 2048, 4
WIDTHS = (4, 1, 2, 8, 16)  # bytes
ARITHMETIC = {
    "ADD": np.add, "SUB": np.subtract, "MUL": np.multiply, "AND": np.bitwise_and, "OR": np.bitwise_or,
    "XOR": np.bitwise_xor, "SHL": lambda a, b: a << (b % 32), "SHR": lambda a, b: a >> (b % 32),
    "MIN": lambda a, b: np.minimum(a.view(np.int32), b.view(np.int32)).view(np.uint32),
    "MAX": lambda a, b: np.maximum(a.view(np.int32), b.view(np.int32)).view(np.uint32), "LESS": np.less,
}
SHUFFLES = ("SHUFFLE", "SHUFFLE_XOR", "SHUFFLE_UP", "SHUFFLE_DOWN")
VOTES = ("BALLOT", "ANY", "ALL")
SHARED = ("LOAD", "GATHER", "STORE")
BARRIERS = ("BLOCK_SYNC", "SYNCTHREADS")
UNPAIRED = {*BARRIERS, "EXIT"}  # they have no other branch
OPS = (*ARITHMETIC, "CONSTANT", "THREAD", *SHUFFLES, *VOTES, *SHARED, "WARP_SYNC", *BARRIERS, "EXIT")
DRAWN = (*ARITHMETIC, "CONSTANT", "THREAD", *2 * (*SHUFFLES, *VOTES), *3 * SHARED, "WARP_SYNC", *BARRIERS)
MASKS = (0xFFFFFFFF, 0x0000FFFF, 0xAAAAAAAA, 0x80000000, 0x0FF00FF0, 0x00000007)


@dataclass(frozen=True)
class Instruction:
    """One instruction; its fields are those of `program.cuh`.

    Parameters
    ----------
    op : str
        One of OPS.
    to, a, b : int
        Registers.
    immediate : int
        Below 2¹⁶.
    width : int
        Bytes of an access, or of a shuffled value.
    masks : tuple of int
        The lanes of each warp that take part.
    otherwise : bool
        The other branch of the instruction before it.
    """

    op: str
    to: int = 0
    a: int = 0
    b: int = 0
    immediate: int = 0
    width: int = 4
    masks: tuple[int, ...] = (MASKS[0],) * WARPS
    otherwise: bool = False

    def __str__(self) -> str:
        masks = " ".join(f"{mask:08x}" for mask in self.masks)
        return (f"{self.op} to r{self.to}, from r{self.a} r{self.b}, immediate {self.immediate}, "
                f"width {self.width}, lanes {masks}{', in the other branch' if self.otherwise else ''}")


def draw(number: Callable[[int], int], op: str | None = None) -> Instruction:
    """An instruction as it comes; `number(n)` gives one of 0 … n − 1."""
    kind = number(len(MASKS) + 2)
    masks = (MASKS[kind],) * WARPS if kind < len(MASKS) else tuple(number(1 << 32) for _ in range(WARPS))
    to, a, b = (number(REGISTERS) for _ in range(3))
    return Instruction(op or DRAWN[number(len(DRAWN))], to, a, b, immediate=number(1 << 16),
                       width=WIDTHS[number(len(WIDTHS))], masks=masks, otherwise=number(3) == 2)


@dataclass(frozen=True)
class Program:
    """A program without races, and what it leaves behind.

    Parameters
    ----------
    threads : int
    code : list of Instruction
    start, end : (threads, REGISTERS) uint32
        Each thread's registers, before and after.
    shared : (SHARED_BYTES / 4,) uint32
        What the threads that reach the end write out of shared memory; all ones where none does.
    needed : list of int
        Which of the code are barriers without which the next instruction races.
    """

    threads: int
    code: list[Instruction]
    start: np.ndarray = field(repr=False)
    end: np.ndarray = field(repr=False)
    shared: np.ndarray = field(repr=False)
    needed: list[int] = field(default_factory=list)

    def words(self) -> np.ndarray:
        """The code as the interpreter reads it."""
        rows = [(OPS.index(i.op), i.to, i.a, i.b, i.immediate, i.width, *i.masks) for i in self.code]
        return np.array(rows, np.uint32).reshape(-1, 6 + WARPS)


class Block:
    """All threads of a block in lock-step."""

    def __init__(self, registers: np.ndarray):
        self.registers, self.threads = registers.copy(), len(registers)
        self.shared = np.full(SHARED_BYTES, 0xFF, np.uint8)
        self.warp, self.lane = np.divmod(np.arange(self.threads), LANES)
        self.live = np.ones(self.threads, bool)

    def masks(self, threads: np.ndarray) -> tuple[int, ...]:
        """The lanes of each warp among (threads,) bool."""
        return tuple(int((1 << self.lane[threads & (self.warp == w)]).sum()) for w in range(WARPS))

    def part(self, i: Instruction) -> np.ndarray:
        """(threads,) bool: those that take part."""
        return np.array(i.masks)[self.warp] >> self.lane & 1 == 1

    def bytes_of(self, i: Instruction) -> np.ndarray:
        """(threads, width): the bytes of shared memory each thread reaches."""
        own = np.arange(self.threads) * (2 * (i.immediate & 255) + 1) + (i.immediate >> 8)
        slot = (self.registers[:, i.b] if i.op == "GATHER" else own) % (SHARED_BYTES // i.width)
        return slot[:, None].astype(int) * i.width + np.arange(i.width)

    def sources(self, i: Instruction) -> np.ndarray:
        """The lane from which each thread takes a shuffled value."""
        by = i.immediate % LANES
        if i.op == "SHUFFLE_XOR":
            return self.lane ^ by
        if i.op == "SHUFFLE_UP":
            return np.where(self.lane >= by, self.lane - by, self.lane)
        if i.op == "SHUFFLE_DOWN":
            return np.where(self.lane + by < LANES, self.lane + by, self.lane)
        source, part = self.lane.copy(), self.part(i)
        for w in range(WARPS):
            lanes, here = self.lane[part & (self.warp == w)], self.warp == w
            if len(lanes):
                source[here] = lanes[(self.registers[here, i.b] + np.uint32(i.immediate)) % len(lanes)]
        return source

    def step(self, i: Instruction) -> None:
        part = self.part(i)
        if i.op == "EXIT":
            self.live &= ~part
        elif i.op == "STORE":
            values = self._words(i.a, max(i.width, 4)).view(np.uint8).reshape(self.threads, -1)
            self.shared[self.bytes_of(i)[part]] = values[part, :i.width]
        elif i.op not in ("WARP_SYNC", *BARRIERS):
            for k, word in enumerate(self._result(i, part)):
                self.registers[part, (i.to + k) % REGISTERS] = word[part]

    def _words(self, register: int, size: int) -> np.ndarray:
        """(threads, size / 4): neighbouring registers."""
        return np.ascontiguousarray(self.registers[:, (register + np.arange(size // 4)) % REGISTERS])

    def _result(self, i: Instruction, part: np.ndarray) -> list[np.ndarray]:
        """The words an instruction gives each thread."""
        a, b = self.registers[:, i.a], self.registers[:, i.b]
        if i.op in ARITHMETIC:
            return [ARITHMETIC[i.op](np.ascontiguousarray(a), np.ascontiguousarray(b))]
        if i.op == "CONSTANT":
            return [np.full(self.threads, i.immediate)]
        if i.op == "THREAD":
            return [np.arange(self.threads)]
        if i.op in SHUFFLES:
            source = np.minimum(self.warp * LANES + self.sources(i), self.threads - 1)
            assert part[source[part]].all()
            size = i.width if i.op == "SHUFFLE" and i.width == 8 else 4
            return list(self._words(i.a, size)[source].T)
        if i.op in VOTES:
            votes = np.array(self.masks(part & (a < b)))[self.warp]
            return [{"BALLOT": votes, "ANY": votes != 0, "ALL": votes == np.array(i.masks)[self.warp]}[i.op]]
        padded = np.zeros((self.threads, max(i.width, 4)), np.uint8)
        padded[:, :i.width] = self.shared[self.bytes_of(i)]
        return list(padded.view(np.uint32).T)


def _fit(block: Block, drawn: Instruction, before: Instruction | None) -> Instruction:
    """The instruction with masks of living lanes that all find the lane they ask.

    `before` is the instruction whose other branch it may be.
    """
    part, otherwise = block.part(drawn) & block.live, False
    if drawn.op in BARRIERS:
        part = block.live
    elif drawn.otherwise and before and not {drawn.op, before.op} & UNPAIRED and not before.otherwise:
        part, otherwise = block.live & ~block.part(before), True
    fitted = replace(drawn, masks=block.masks(part), otherwise=otherwise)
    if drawn.op in SHUFFLES[1:]:
        fitted = replace(fitted, immediate=drawn.immediate % LANES)
        source = block.warp * LANES + block.sources(fitted)
        while True:
            found = part & (source < block.threads) & part[np.minimum(source, block.threads - 1)]
            if (found == part).all():
                break
            part = found
    return replace(fitted, masks=block.masks(part))


def settle(drawn: Sequence[Instruction], start: np.ndarray) -> Program:
    """A program of these instructions, with a barrier wherever two threads would race.

    Parameters
    ----------
    drawn : sequence of Instruction
    start : (threads, REGISTERS) uint32
    """
    block, clocks, code, needed = Block(start), Clocks(len(start), SHARED_BYTES), [], []

    def emit(i: Instruction) -> None:
        part = block.part(i)
        if i.op in SHARED:
            clocks.access(part, block.bytes_of(i), i.op == "STORE")
        elif i.op == "WARP_SYNC":
            clocks.meet(*(part & (block.warp == w) for w in range(WARPS)))
        elif i.op in BARRIERS:
            clocks.meet(part)
        block.step(i)
        code.append(i)

    for raw in drawn:
        before = code[-1] if code else None
        i = _fit(block, raw, before)
        if not any(i.masks):
            continue
        everyone, part, remedy = block.masks(block.live), block.part(i), None
        if i.op in SHARED:
            pairs = clocks.races(part, block.bytes_of(i), i.op == "STORE")
            if (pairs & (block.warp[:, None] != block.warp)).any():
                remedy = BARRIERS[len(code) % 2]
            elif pairs.any():
                remedy = "WARP_SYNC"
        elif i.op == "EXIT" and clocks.unseen(part, block.live):  # what has left meets nobody any more
            remedy = "BLOCK_SYNC"
        if remedy:
            needed += [len(code)] if i.op in SHARED else []
            emit(Instruction(remedy, masks=everyone))
        emit(replace(i, otherwise=i.otherwise and not remedy))
    shared = block.shared.view(np.uint32).copy()
    shared[~block.live[np.arange(len(shared)) % block.threads]] = 0xFFFFFFFF
    return Program(block.threads, code, start, block.registers, shared, needed)


# ---- as CUDA


def _statement(i: Instruction, mask: str) -> str:
    to, a, b = (f"r[{n}]" for n in (i.to, i.a, i.b))
    if i.op in ARITHMETIC:
        return f"{to} = arithmetic({i.op}, {a}, {b});"
    source = f"lane_of({mask}, {b} + {i.immediate}u)"
    if i.op == "SHUFFLE" and i.width == 8:
        return f"r.set_wide({i.to}, __shfl_sync({mask}, r.wide({i.a}), {source}));"
    own = f"own_slot({i.immediate}, {i.width}), {i.width}"
    return {
        "CONSTANT": f"{to} = {i.immediate};", "THREAD": f"{to} = threadIdx.x;",
        "SHUFFLE": f"{to} = __shfl_sync({mask}, {a}, {source});",
        "SHUFFLE_XOR": f"{to} = __shfl_xor_sync({mask}, {a}, {i.immediate});",
        "SHUFFLE_UP": f"{to} = __shfl_up_sync({mask}, {a}, {i.immediate});",
        "SHUFFLE_DOWN": f"{to} = __shfl_down_sync({mask}, {a}, {i.immediate});",
        "BALLOT": f"{to} = __ballot_sync({mask}, {a} < {b});",
        "ANY": f"{to} = __any_sync({mask}, {a} < {b});", "ALL": f"{to} = __all_sync({mask}, {a} < {b});",
        "LOAD": f"load_slot(r, {i.to}, {own});", "STORE": f"store_slot(r, {i.a}, {own});",
        "GATHER": f"load_slot(r, {i.to}, {b} % {SHARED_BYTES // i.width}, {i.width});",
        "WARP_SYNC": f"__syncwarp({mask});", "BLOCK_SYNC": "block_sync();",
        "SYNCTHREADS": "__syncthreads();", "EXIT": "return leave(r, g_out);",
    }[i.op]


def cuda(programs: Sequence[Program]) -> str:
    """A `.cu` with each program as a kernel `program_0`, `program_1`, …: every instruction its own call."""
    lines = [f'#include "{Path(__file__).parent / "simt_kernels" / "program.cuh"}"']
    for n, program in enumerate(programs):
        lines += ["", f"KERNEL(WARPS * WARP, 1) program_{n}(const uint32_t* g_in, uint32_t* g_out,"
                  " uint32_t* g_shared) {", "  Registers r;", "  start(r, g_in);"]
        for at, i in enumerate(program.code):
            statement = _statement(i, f"m{at}")
            masks = f"const uint32_t m{at} = mask_of({{{', '.join(f'{mask:#x}u' for mask in i.masks)}}});"
            if i.op in BARRIERS:
                lines.append(f"  {statement}")
            elif i.otherwise:  # both branches on one line
                lines[-1:] = [f"  {masks}", f"{lines[-1]} else if (takes_part(m{at})) {statement}"]
            else:
                lines += [f"  {masks}", f"  if (takes_part(m{at})) {statement}"]
        lines += ["  finish(r, g_out, g_shared);", "}"]
    return "\n".join(lines) + "\n"
