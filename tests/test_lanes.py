"""Query chunks on several streams: lanes share nothing, fork from the current stream and join it."""
from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from test_prefill import run

import cuattn
from cuattn.devices import CARDS
from cuattn.kernels import ROWS
from cuattn.kernels.base import Unsupported
from cuattn.kernels.shapes import AttentionShape

CARD = CARDS["H200"]
SMALL = {"chunk": 64, "tile_m": 32, "tile_n": 32}
LOOPS = [
    ("chunked_unfused", SMALL),
    ("chunked_fused", {**SMALL, "scores": "global", "parallel": "serial"}),
    ("chunked_fused", {**SMALL, "scores": "shared", "parallel": "serial"}),
]


def plan(kernel: str, m: int, **constants):
    return ROWS[kernel].plan(AttentionShape(1, 4, 2, m, m, 64, "float16"), CARD, constants)


@pytest.mark.parametrize("kernel, constants", LOOPS, ids=str)
def test_streams_change_no_bit(machine, randn, kernel, constants):
    """Judged against the reference, and equal to one launch after another; replayed as a graph, too."""
    q, k, v = randn(1, 190, 2, 64), randn(1, 203, 2, 64), randn(1, 203, 2, 64)
    _, o, lse = run(machine, kernel, q, k, v, causal=True, constants=constants)
    two = {**constants, "streams": 2}
    p, streamed, lse_streamed = run(machine, kernel, q, k, v, causal=True, constants=two)
    assert p.plan.lanes == 2
    assert (o.view("u2") == streamed.view("u2")).all() and (lse == lse_streamed).all()
    if machine.name == "gpu":
        replay = machine.capture(p.run)
        machine.poison(p.outputs[0])
        replay()
        machine.synchronize()
        assert (o.view("u2") == machine.download(p.outputs[0]).view("u2")).all()


@pytest.mark.parametrize("kernel, constants", LOOPS, ids=str)
def test_lanes_share_nothing(cpu, randn, kernel, constants):
    """The results are the same whichever lane comes first, and with the lanes in turn."""
    q, k, v = (cpu.upload(randn(1, 190, 2, 64)) for _ in range(3))
    p = cuattn.plan_attention(q, k, v, causal=True, kernel=kernel,
                              constants={**constants, "streams": 3})
    expected = [x.copy() for x in p.run()]
    lanes = [[x for x, y in zip(p.launches, p.plan.launches) if y.lane == lane] for lane in range(3)]
    assert p.plan.lanes == 3 and all(lanes)
    longest = max(map(len, lanes))
    turns = [launch for step in range(longest) for lane in lanes for launch in lane[step : step + 1]]
    for order in (lanes[2] + lanes[0] + lanes[1], turns):
        assert len(order) == len(p.launches)
        for array in (*p.outputs, *(p.tensors[name].array for name in p.plan.scratch)):
            cpu.poison(array)
        for launch in order:
            launch()
        for got, want in zip(p.outputs, expected):
            np.testing.assert_array_equal(got.view("u1"), want.view("u1"))


def test_the_scratch_grows_with_the_streams_alone():
    one, four = (plan("chunked_unfused", 4096, streams=streams) for streams in (1, 4))
    assert four.scratch_bytes == 4 * one.scratch_bytes
    assert [x.entry for x in four.launches] == [x.entry for x in one.launches]
    assert {x.lane for x in one.launches} == {0} and four.lanes == 4
    assert plan("chunked_fused", 4096, parallel="serial", streams=4).scratch_bytes == 0


def test_no_more_lanes_than_query_chunks():
    assert plan("chunked_unfused", 300, streams=8).constants["streams"] == 3
    assert plan("chunked_fused", 300, streams=8).lanes == 1  # all query chunks in one grid
    with pytest.raises(Unsupported, match="expected at most 32 streams, got 33; choose fewer"):
        plan("chunked_unfused", 8192, streams=33)


class Stream:
    """Notes what happens on it, in one list for all."""

    def __init__(self, log: list, name: str):
        self.log, self.ptr = log, name

    def wait_event(self, event) -> None:
        self.log.append((self.ptr, "waits for", event.what))


class Event:
    def __init__(self, log: list):
        self.log = log

    def record(self, stream: Stream) -> None:
        self.what = f"event {len(self.log)}"
        self.log.append((stream.ptr, "records", self.what))


@pytest.mark.parametrize("lanes", [1, 3])
def test_the_gpu_forks_before_and_joins_after(lanes):
    """Every lane's stream waits for the current one, and that one for each of them."""
    gpu = pytest.importorskip("cuattn.gpu")
    log: list = []
    current, sides = Stream(log, "current"), iter([Stream(log, "side 1"), Stream(log, "side 2")])
    machine = object.__new__(gpu.GpuMachine)
    machine.xp = SimpleNamespace(cuda=SimpleNamespace(
        get_current_stream=lambda: current, Event=lambda **options: Event(log),
        Stream=lambda non_blocking: next(sides),
    ))
    for _ in range(2):  # the second time on the same streams
        log.clear()
        with machine.lanes(lanes):
            log.append("launches")
        events = [what for *_, what in log if what.startswith("event")] if lanes > 1 else []
        expected = ["launches"]
        if lanes == 3:
            fork, first, second = dict.fromkeys(events)
            expected = [
                ("current", "records", fork), ("side 1", "waits for", fork), ("side 2", "waits for", fork),
                "launches",
                ("side 1", "records", first), ("current", "waits for", first),
                ("side 2", "records", second), ("current", "waits for", second),
            ]
        assert log == expected
