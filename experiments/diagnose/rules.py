"""What `diagnose` knows, as data: the numbers it reads, the thresholds it holds them to, causes, and rules.

A and B are the two articles whose symptoms these are: A on chunked attention that is 70 times slower than
standard, B on a paged cache that is. The number behind a letter is the section; "ours" marks a threshold
that neither states. The claims are those of the suites.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fact:
    """A number (or word) that rules read.

    `unit` is shown behind it. `least` and `most` bound what a user may give; a `positive` one may not be 0.
    `option` is what gives it: one option, or for a fact derived from others, those in words.
    """

    meaning: str
    option: str
    unit: str = ""
    least: float = 0.0
    most: float = 1e18
    choices: tuple[str, ...] = ()
    positive: bool = False


@dataclass(frozen=True)
class Threshold:
    """A value that a fact is compared with, and where it comes from."""

    value: float
    source: str


@dataclass(frozen=True)
class Cause:
    """What may be wrong, what would remedy it, and the suites that would prove it."""

    what: str
    remedy: str
    suites: tuple[str, ...]
    claims: tuple[int, ...]


@dataclass(frozen=True)
class Rule:
    """One line of reasoning.

    `when` must all hold and `unless` must not; each is "fact operator threshold", or "fact is word". Where an
    `unless` cannot be told, the rule holds and its fact is named as what would decide. Every `support` that
    holds lifts the rule among its equals. `strength` ranks: 4 direct evidence, 3 a symptom as an article
    states it, 2 a reading of it, 1 a mere possibility, 0 what is said only where nothing else is.
    """

    cause: str
    strength: int
    when: tuple[str, ...]
    unless: tuple[str, ...] = ()
    support: tuple[str, ...] = ()
    source: str = ""


PERCENT, YES_NO = {"unit": "%", "most": 100.0}, ("yes", "no")
FACTS = {
    "tokens_per_s": Fact("throughput", "--tokens-per-s", "tokens/s", positive=True),
    "baseline_tokens_per_s": Fact(
        "throughput of standard (for a paged cache: contiguous) attention on the same load and dtype",
        "--baseline-tokens-per-s", "tokens/s", positive=True),
    "peak_memory": Fact("peak memory", "--peak-memory", "B", positive=True),
    "baseline_memory": Fact("the baseline's peak memory", "--baseline-memory", "B", positive=True),
    "gpu_use": Fact("share of the GPU's compute in use", "--gpu-use", **PERCENT),
    "sm_busy": Fact("share of the multiprocessors that have work", "--sm-busy", **PERCENT),
    "bandwidth_use": Fact("share of the memory bandwidth in use", "--bandwidth-use", **PERCENT),
    "memory_share": Fact("share of the time spent in moving scores, not in matrix products",
                         "--memory-share", **PERCENT),
    "launches_per_step": Fact("kernel launches a step", "--launches-per-step"),
    "baseline_launches": Fact("the baseline's launches a step", "--baseline-launches", least=1),
    "step_gap_us": Fact("idle time of the GPU between steps", "--step-gap-us", "µs"),
    "step_us": Fact("length of a step", "--step-us", "µs", positive=True),
    "mean_ms": Fact("mean latency", "--mean-ms", "ms", positive=True),
    "p99_ms": Fact("99th percentile of the latency", "--p99-ms", "ms", positive=True),
    "period_s": Fact("period of latency spikes, if they have one", "--period-s", "s", positive=True),
    "chunk": Fact("keys a chunk", "--chunk", "keys", 1),
    "tile": Fact("rows or keys of an inner tile, the fewer of them", "--tile", "", 1),
    "chunks": Fact("chunks of a sequence", "--chunks", "", 1),
    "chunks_cost": Fact("time added when the number of chunks grows fourfold", "--chunks-cost", "%"),
    "head_dim": Fact("head dim", "--head-dim", "", 1),
    "page": Fact("tokens a page of the cache", "--page", "tokens", 1),
    "accumulator": Fact("dtype that chunks are summed in", "--accumulator",
                        choices=("float16", "bfloat16", "float32")),
    "phase": Fact("what runs", "--phase", choices=("prefill", "decode")),
    # Derived from those above, or from the rows of a run.
    "slowdown": Fact("times slower than the baseline", "--tokens-per-s with --baseline-tokens-per-s", "×"),
    "memory_saved": Fact("memory saved against the baseline", "--peak-memory with --baseline-memory", "%"),
    "launch_ratio": Fact("launches for each of the baseline's",
                         "--launches-per-step with --baseline-launches", "×"),
    "launch_share": Fact("share of the time that launches alone take", "--launches-per-step with --step-us",
                         "%"),
    "gap_share": Fact("share of a step that the GPU waits", "--step-gap-us with --step-us", "%"),
    "tail": Fact("99th percentile over mean", "--p99-ms with --mean-ms", "×"),
    "chunk_remainder": Fact("chunk, less the multiples of 64 and of the head dim", "--chunk with --head-dim"),
    "well_tiled": Fact("whether chunk and inner tiles are already as the remedy asks",
                       "--chunk with --head-dim and --tile", choices=YES_NO),
    "launch_bound": Fact("whether launches cost: by their share of the time, else by their number",
                         "--launches-per-step", choices=YES_NO),
    "gap_bound": Fact("whether gaps cost: by their share of a step, else by their length", "--step-gap-us",
                      choices=YES_NO),
    "chunked": Fact("whether the kernel works in chunks", "--chunk", choices=YES_NO),
    "blocks_per_sm": Fact("thread blocks of the only launch for each multiprocessor", "a run"),
    "scratch_ratio": Fact("scratch for each byte of inputs and outputs", "a run", "×"),
    "sums_in_scratch": Fact("whether the scratch may be O in float32 with its statistics, and no scores",
                            "a run", choices=YES_NO),
    "host_share": Fact("host time of a call over its time on the GPU", "a run", "%"),
}

LAUNCH_US = 5.0  # host time of a launch: measured 4.9 µs on an H200; B 2.3 says a few to tens
THRESHOLDS = {
    "fault": Threshold(10, "A 4.1, 6.1, claim 43: a tenth of standard or less is a fault"),
    "trade-off": Threshold(3, "A 4.1, claim 43: 2 to 3 times is a normal trade-off"),
    "ideal": Threshold(1.3, "A 2.3, claim 43: chunking costs 10 to 30 %"),
    "starved": Threshold(30, "A 4.2, B 3.1: below 30 % the GPU is not fed"),
    "serial": Threshold(20, "A 6.1: below 20 % too little runs in parallel"),
    "in use": Threshold(45, "A 7.2: query chunks side by side take 15 to 45 %, and the GPU is in use"),
    "few": Threshold(4, "ours: with so few the last blocks run alone for a good part of the time"),
    "saturated": Threshold(80, "A 4.2, 6.1: above 80 % memory bounds it"),
    "dominant": Threshold(50, "A 4.2: matrix products ought to take most of it; 70 % at fault, 15 % not"),
    "half": Threshold(50, "ours: decode has nothing to do but read, and reads at less than half the rate"),
    "many": Threshold(100, "B 3.2: more than a hundred a step, against a dozen"),
    "tenfold": Threshold(10, "B 3.2: ten became a hundred"),
    "costly": Threshold(20, "ours: launches alone take a fifth of the time"),
    "long gap": Threshold(50, "B 2.3: a launch takes at most tens of µs, so a longer gap is the host's"),
    "gap": Threshold(10, "ours: a tenth of the step"),
    "host-bound": Threshold(100, "B 3.1: the GPU waits for the host"),
    "uneven": Threshold(2, "ours: neither article gives a number"),
    "even": Threshold(1.2, "ours"),
    "none": Threshold(0, ""),
    "counters": Threshold(1e-3, "ours: numbers that blocks take, but no sums"),
    "rising": Threshold(10, "A 3.4: 16 to 64 chunks, below 1 % to about 15 %"),
    "long sum": Threshold(32, "A 5.4: past 32 chunks sum in float32"),
    "small chunk": Threshold(256, "A 3.1: 256 to 1024 is the usual range"),
    "large chunk": Threshold(1024, "A 3.1: 256 to 1024 is the usual range"),
    "kept": Threshold(10, "ours: A 7.3 saved 17 and 23 %"),
    "small tile": Threshold(64, "A 3.1: cut into 32 × 64 was the fault"),
    "small page": Threshold(16, "B 3.3: 8 was the fault, 16 ten times faster"),
    "in memory": Threshold(0.5, "ours: half as much as all inputs and outputs"),
}

CAUSES = {
    "scheduling": Cause(
        "the GPU waits for the host between steps",
        "schedule on a thread of its own, one step ahead; turn asynchronous scheduling on",
        ("serving-overlap",), (8, 17)),
    "launches": Cause(
        "too many launches: one a request, or one a chunk, instead of one a batch",
        "one launch for the batch (grid over requests and heads), fuse the chunk loop, replay a CUDA graph",
        ("paged-ladder", "ladder"), (8, 15)),
    "allocator": Cause(
        "the cache's allocator stalls everything: defragmentation, preemption or swap",
        "free and allocate pages one by one, defragment in small steps, keep some pages free",
        ("serving-preemption",), (8, 16)),
    "tiles": Cause(
        "chunks or inner tiles too small, or out of step with tensor cores and head dim",
        "chunks of 256 to 1024, a multiple of 64 and of the head dim; inner tiles of 64 to 128",
        ("block-size", "ladder"), (3, 7, 8)),
    "score-traffic": Cause(
        "the scores travel to memory and back",
        "fuse scores, softmax and PV in one kernel; keep the tile in shared memory or registers",
        ("ladder", "memory", "quick"), (1, 4, 8)),
    "parallelism": Cause(
        "too little runs in parallel: query chunks, heads or requests one after another",
        "put query chunks into the grid beside batch and heads; split the keys where these are few",
        ("ladder",), (5, 8)),
    "scatter": Cause(
        "scattered reads of the cache, or too few bytes in flight",
        "16-byte loads, several pages in flight, a page size that is a multiple of the tile",
        ("page-size",), (8, 18)),
    "page": Cause(
        "pages too small",
        "pages of 16 to 64 tokens; a fused kernel hardly minds (see the recorded page-size run)",
        ("page-size",), (8, 14)),
    "accumulation": Cause(
        "summing over chunks costs: rescaling, or converting between precisions",
        "fewer and larger chunks; a float32 accumulator in registers",
        ("precision",), (6, 8)),
    "rounding": Cause(
        "many chunks summed in half precision lose accuracy",
        "sum in float32",
        ("precision",), (6, 39)),
    "memory-kept": Cause(
        "chunking frees little memory: the chunk is too large, or what it used is kept",
        "a smaller chunk; free intermediates, and look at what the allocator caches",
        ("memory",), (1, 8)),
    "tail": Cause(
        "a long tail: the last chunk or request waits for all before it",
        "look at the distribution, not the mean; balance the work over blocks; split long sequences",
        ("ladder", "serving-latency"), (11, 44)),
    "unexplained": Cause(
        "slower than it should be, and these numbers do not say why",
        "profile it: compute and bandwidth use, launches a step, gaps between steps",
        ("quick",), (8, 43)),
}

# What makes A's reading of an idle GPU wrong, and B's right: it is the host that is slow.
_HOST = ("launch_bound is yes", "gap_bound is yes")
# What too little that runs in parallel is not: A 3.3 saw it in multiprocessors that wait.
_BUSY = "sm_busy >= in use"
_PAGED = "page >= none"
_TILED = "well_tiled is yes"
_TILES = ("chunk < small chunk", "chunk_remainder > none", "tile < small tile")
RULES = (
    Rule("scheduling", 4, ("gap_share >= gap",), support=("gpu_use < starved",), source="B 3.4"),
    Rule("scheduling", 4, ("host_share >= host-bound",), source="B 3.1"),
    Rule("launches", 4, ("launch_ratio >= tenfold",), support=("gpu_use < starved",), source="B 3.2"),
    Rule("launches", 4, ("launch_share >= costly",), support=("gpu_use < starved",), source="A 4.2, B 2.3"),
    Rule("score-traffic", 4, ("scratch_ratio >= in memory",), ("phase is decode", "sums_in_scratch is yes"),
         ("bandwidth_use > saturated",), "A 3.2"),
    Rule("scheduling", 3, ("step_gap_us >= long gap",), ("gap_share < gap",), ("gpu_use < starved",),
         "B 3.4"),
    Rule("launches", 3, ("launches_per_step >= many",), ("gpu_use >= starved", "launch_share < costly"),
         ("gpu_use < starved",), "B 3.2"),
    Rule("allocator", 3, ("period_s > none",), ("tail < even",), ("tail >= uneven",), "B 2.2"),
    Rule("tiles", 3, ("slowdown >= fault",), (*_HOST, "chunked is no", _PAGED, _TILED),
         ("gpu_use < starved", *_TILES), "A 6.1, row 1"),
    Rule("score-traffic", 3, ("memory_share >= dominant",), ("phase is decode",), ("slowdown >= fault",),
         "A 4.2"),
    Rule("score-traffic", 3, ("bandwidth_use > saturated",), ("phase is decode", "scratch_ratio <= counters"),
         ("memory_share >= dominant",), "A 6.1, row 3"),
    Rule("scatter", 3, ("bandwidth_use < starved", "gpu_use < starved", _PAGED), _HOST, source="B 4.3"),
    Rule("parallelism", 3, ("gpu_use < serial",),
         (*_HOST, _BUSY, "bandwidth_use > saturated", "phase is decode"), source="A 6.1, row 2"),
    Rule("parallelism", 3, ("gpu_use < starved", "blocks_per_sm < few"), (*_HOST, _BUSY),
         source="A 3.3, 5.3"),
    Rule("accumulation", 3, ("chunks_cost >= rising",), support=("chunks > long sum",),
         source="A 6.1, row 4"),
    Rule("memory-kept", 3, ("memory_saved < kept",), ("chunked is no",), ("chunk > large chunk",),
         "A 6.1, row 5"),
    Rule("page", 2, ("page < small page", "slowdown > trade-off"), source="B 3.3"),
    Rule("scatter", 2, ("phase is decode", "bandwidth_use < half"), _HOST, source="B 4.3"),
    Rule("tiles", 2, ("gpu_use < starved",),
         (*_HOST, "bandwidth_use > saturated", "phase is decode", _PAGED, "blocks_per_sm < few", _TILED),
         _TILES, "A 4.2"),
    Rule("tail", 2, ("tail >= uneven",), ("period_s > none",), source="A 6.2, B 5.1"),
    Rule("rounding", 2, ("chunks > long sum", "accumulator is float16"), source="A 5.4"),
    Rule("rounding", 2, ("chunks > long sum", "accumulator is bfloat16"), source="A 5.4"),
    Rule("tiles", 1, ("slowdown > trade-off",), (*_HOST, "chunked is no", _PAGED, _TILED), _TILES, "A 4.1"),
    Rule("accumulation", 1, ("chunks > long sum", "slowdown > ideal"), source="A 3.4"),
    Rule("scheduling", 1, ("gpu_use < starved",), ("gap_bound is no", "bandwidth_use > saturated"),
         source="B 3.1"),
    Rule("launches", 1, ("slowdown > trade-off", _PAGED), ("launch_bound is no",), source="B 3.2"),
    Rule("unexplained", 0, ("slowdown > trade-off",), source="A 4.1"),
    Rule("unexplained", 0, ("gpu_use < starved",), ("bandwidth_use > saturated", "phase is decode"),
         source="A 4.2"),
)
