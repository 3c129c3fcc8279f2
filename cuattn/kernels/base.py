"""What a kernel tells the toolkit about itself: its row, its plan, its cost.

A kernel is one `.cu` file and one module here that defines `ROW`. Everything in this package is pure
integers: no arrays, no GPU, no compiler. The module is also the format of a kernel from outside the
repository.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float8_e4m3": 1, "int8": 1}
QUANTISED = ("float8_e4m3", "int8")  # what a cache may hold in place of its queries' type, times scales
SCRATCH_BYTES = {**ELEMENT_BYTES, "int32": 4}  # scratch may also hold numbers of pages and keys
MMA_ROWS = 16  # rows of one mma.sync tile
WARP = 32  # threads
MAX_THREADS = 1024  # of a block
GRID_LIMIT = 65535  # of the y and z extents of a grid
MOST_LAUNCHES = 1 << 19  # seconds of launching; beyond, the host would hold gigabytes of them


def ceil_div(a: int, b: int) -> int:
    """Smallest integer ≥ a / b."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """Smallest multiple of b that is ≥ a."""
    return ceil_div(a, b) * b


def tile_row(cols: int) -> int:
    """Elements a row of a shared-memory tile takes: SmemTile::STRIDE of prim/smem.cuh at whole mma steps."""
    return round_up(cols, MMA_ROWS) + 8


@dataclass(frozen=True)
class TileMap:
    """By what tiles a launch copies one of its arrays (TMA). Among the arguments it is the kernel's parameter
    `const __grid_constant__ TensorMap`.

    Parameters
    ----------
    array : str
        The tensor's name, as `Row.arguments` gets it.
    box : tuple of int
        Elements of a tile, in the array's order of dimensions: `cuattn.tensor_map` says which are taken.
    swizzle : {0, 32, 64, 128}
        Width of the pattern in shared memory, in bytes.
    """

    array: str
    box: tuple[int, ...]
    swizzle: int = 0


@dataclass(frozen=True)
class Launch:
    """One kernel launch: which file and entry, over what grid, compiled with which constants.

    Launches of one `lane` run in their order. Those of different lanes are independent, and a machine may run
    them side by side; so they share nothing that one of them writes. `cluster`: neighbouring blocks along
    x that run together; it divides the grid's x. `maps`: the tensor maps that its argument list names, by the
    names of their parameters.
    """

    file: str
    entry: str
    grid: tuple[int, int, int]
    block: int
    smem_bytes: int
    constants: Mapping[str, Any]
    lane: int = 0
    cluster: int = 1
    maps: Mapping[str, TileMap] = field(default_factory=dict)


@dataclass(frozen=True)
class Chunked:
    """How a kernel rounds that goes over the keys in chunks, with its scores and sums in memory.

    Scores and e^(s − m) are rounded to the input dtype; each chunk's P V, and after it the running sum, to
    `accumulate`. `fused`: P V goes into the sum unrounded.
    """

    chunk: int
    accumulate: str
    fused: bool = False


@dataclass(frozen=True)
class Plan:
    """Everything decidable from the shape and the device.

    Parameters
    ----------
    launches : tuple of Launch
    constants : mapping
        The tunables as chosen.
    scratch : mapping of name to (shape, dtype)
    rounding : {"float32", "weights", "input"} or Chunked
        What is rounded to the input dtype, and so how the output is judged: e^(s − m) only; P = softmax(S)
        after its division by l; or the scores S as well. `Chunked`: at each chunk of keys.
    zeroed : frozenset of str
        Scratch that must be zero before a launch, and is zero again after it: counters.
    """

    launches: tuple[Launch, ...]
    constants: Mapping[str, Any]
    scratch: Mapping[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    rounding: str | Chunked = "float32"
    zeroed: frozenset[str] = frozenset()

    @property
    def launch_count(self) -> int:
        """Launches with work to do: an empty grid is not launched."""
        return sum(1 for launch in self.launches if all(launch.grid))

    @cached_property
    def lanes(self) -> int:
        """How many there are; each number below has a launch."""
        return 1 + max((launch.lane for launch in self.launches), default=0)

    @property
    def scratch_bytes(self) -> int:
        total = 0
        for shape, dtype in self.scratch.values():
            size = SCRATCH_BYTES[dtype]
            for extent in shape:
                size *= extent
            total += size
        return total


@dataclass(frozen=True)
class Cost:
    """Closed forms.

    `bytes_*` are the global bytes the launches request, equal to what the CPU machine counts.
    """

    flops: int
    bytes_loaded: int
    bytes_stored: int
    launches: int
    scratch_bytes: int = 0


class Unsupported(ValueError):
    """This kernel cannot run this shape on this device; the message says why and what would."""


@dataclass(frozen=True, eq=False)
class Row:
    """A kernel's entry in the table.

    Parameters
    ----------
    name, family : str
        Family is prefill, decode, mla (decode over latents), cascade (decode over shared keys), cache (new
        rows), pages (copies of them) or probe.
    file : str
        Path below `kernels_cu/`; for a kernel from outside absolute, or from its module's folder.
    archs : tuple of str
        "sm_80+" means that architecture and every later one; "sm_90a" means exactly that one.
    dtypes : tuple of str
    head_dims : range
        Head dims the kernel computes (padding inside counts as computing).
    features : frozenset of str
        Among causal, gqa, lse, paged, rope, split, window, softcap, sinks, varlen, dv, quantised, queries
        (decode of several a sequence).
    constants : mapping
        Tunables with their defaults; None lets the plan choose an integer by shape and device.
    choices : mapping
        Tunable → the values worth trying, which `tune` combines; none for one that is not a matter of speed.
        Combinations may be invalid: the plan refuses those.
    teaches : str
        One sentence: what a reader learns from this kernel.
    plan : callable (shape, device, overrides) -> Plan
    cost : callable (shape, plan, lengths) -> Cost
        `lengths`: of decode the keys of each sequence; of packed sequences where each begins, and the last
        ends, among the queries and among the keys; of a cascade see its own; else None.
    arguments : callable (shape, plan, tensors) -> list, one entry a launch, of [(name, value)]
        `tensors` maps names to machine.Tensor; values are Tensor, TileMap or NumPy scalars.
    deterministic : bool
        Equal bits under every schedule of one plan's blocks and threads. Other constants, or a choice that
        the plan makes by shape, sum in another order: by default `paged` splits by the batch size, so a
        sequence's last bits may depend on the batch it is in; `splits` given, they do not.
    spills : str
        Empty, or the reason why register spills are accepted.
    """

    name: str
    family: str
    file: str
    archs: tuple[str, ...]
    dtypes: tuple[str, ...]
    head_dims: range
    features: frozenset[str]
    constants: Mapping[str, Any]
    teaches: str
    plan: Callable[..., Plan]
    cost: Callable[..., Cost]
    arguments: Callable[..., list]
    deterministic: bool = True
    spills: str = ""
    choices: Mapping[str, tuple] = field(default_factory=dict)

    def __post_init__(self):
        object.__setattr__(self, "constants", MappingProxyType(dict(self.constants)))
        object.__setattr__(self, "choices", MappingProxyType(dict(self.choices)))

    def runs_on(self, arch: str) -> bool:
        """Whether the row lists `arch` ("sm_90a", "cpu", …), exactly or as a minimum."""
        if arch == "cpu":
            return True
        number = int(arch[3:].rstrip("a"))
        for entry in self.archs:
            if entry == arch or (entry.endswith("+") and number >= int(entry[3:-1])):
                return True
        return False


def resolve(row_constants: Mapping[str, Any], overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """Defaults with the user's overrides on top.

    A tunable whose default is an integer or None takes an integer of at least 1, and None where that is its
    default; any other takes what its default is.

    Raises
    ------
    Unsupported
        An unknown name, or a value of another kind.
    """
    chosen = dict(row_constants)
    for name, value in (overrides or {}).items():
        if name not in chosen:
            known = ", ".join(sorted(chosen)) or "none"
            raise Unsupported(f"constants: '{name}' is not a tunable of this kernel (it has: {known}); "
                              "remove it")
        default = row_constants[name]
        if default is None and value is None:
            continue
        kind = int if default is None else type(default)
        if type(value) is not kind or (kind is int and value < 1):  # a bool is an int to isinstance
            expected = "an int of at least 1" if kind is int else f"a {kind.__name__}"
            raise Unsupported(f"constants: {name}: expected {expected}{' or None' * (default is None)}, "
                              f"got {value!r}; change it or leave it out")
        chosen[name] = value
    return chosen


def check_choice(kernel: str, chosen: Mapping[str, Any], name: str, values: tuple[str, ...]) -> None:
    """Refuses a tunable whose value is none of these words."""
    if chosen[name] not in values:
        known = f"{', '.join(map(repr, values[:-1]))} or {values[-1]!r}"
        raise Unsupported(f"{kernel}: {name} must be {known}, got {chosen[name]!r}; choose one")


def check_grid(kernel: str, what: str, extent: int, limit: int = GRID_LIMIT) -> None:
    """Refuses a grid that no device launches."""
    if extent > limit:
        raise Unsupported(f"{kernel}: expected at most {limit} {what}, got {extent}; split the call")


def check_launches(kernel: str, count: int, of: str, instead: str) -> None:
    """Refuses more launches than anybody waits for."""
    if count > MOST_LAUNCHES:
        raise Unsupported(f"{kernel}: expected at most {MOST_LAUNCHES} launches, got {count} {of}; {instead}")
