"""What each kernel moves, pinned: another number is another kernel, or another way of counting."""
from __future__ import annotations

import pytest
from traffic_cases import CASES, summary

#: Of each entry, in the order of traffic_cases.SUMS: sectors loaded, copied, stored and changed by atomics;
#: passes and conflicts of shared loads and of shared stores; passes of copies and of wgmma; tensor
#: instructions. The conflicts of `paged` are its warps' states, whose rows of D floats start in one bank.
PINNED = {
    "flash": {"flash": (0, 55104, 5026, 0, 47280, 0, 1536, 0, 10752, 0, 36864)},
    "flash causal": {"flash": (0, 47744, 5026, 0, 37040, 0, 1536, 0, 8704, 0, 28672)},
    "flash_hopper": {"flash_hopper": (0, 31840, 226, 12, 880, 0, 20, 0, 0, 21504, 3584)},
    "flash packed": {"flash": (384, 33312, 5072, 0, 24240, 0, 2048, 0, 6656, 0, 18432)},
    "flash_hopper packed": {"flash_hopper": (176, 24480, 464, 24, 1056, 0, 152, 0, 0, 13824, 2304)},
    "standard": {
        "standard_scores": (0, 45552, 50400, 0, 27648, 0, 0, 0, 9216, 0, 18432),
        "standard_softmax": (100800, 0, 26400, 0, 153600, 0, 19200, 0, 0, 0, 0),
        "standard_output": (0, 61752, 9600, 0, 46080, 0, 0, 0, 13824, 0, 18432),
    },
    "chunked_unfused": {
        "chunked_scores": (0, 123040, 50400, 0, 38400, 0, 0, 0, 23040, 0, 15360),
        "chunked_softmax": (30000, 0, 36000, 0, 0, 0, 0, 0, 0, 0, 0),
        "chunked_output": (0, 117640, 28800, 0, 38400, 0, 0, 0, 23040, 0, 15360),
        "chunked_rescale": (26400, 0, 14400, 0, 0, 0, 0, 0, 0, 0, 0),
        "chunked_finish": (7200, 0, 6000, 0, 0, 0, 0, 0, 0, 0, 0),
    },
    "chunked_fused": {"chunked_slice": (0, 87040, 9826, 0, 92960, 0, 27040, 0, 16640, 0, 30720)},
    "chunked_fused, scores in memory": {
        "chunked_scores": (0, 45552, 50400, 0, 41472, 0, 0, 0, 9216, 0, 18432),
        "chunked_pair": (19808, 77720, 29712, 0, 54696, 0, 19680, 0, 15360, 0, 15360),
        "chunked_finish": (7200, 0, 6000, 0, 0, 0, 0, 0, 0, 0, 0),
    },
    "chunked_fused, by columns": {
        "chunked_slice": (0, 87040, 9826, 0, 208160, 107520, 149920, 107520, 16640, 0, 30720),
    },
    "chunked_atomic": {
        "chunked_clear": (0, 0, 12000, 0, 0, 0, 0, 0, 0, 0, 0),
        "chunked_max": (0, 61520, 0, 678, 38400, 0, 0, 0, 11520, 0, 15360),
        "chunked_add": (3600, 101440, 0, 61200, 84000, 0, 14880, 0, 19200, 0, 30720),
        "chunked_finish": (12000, 0, 6000, 0, 0, 0, 0, 0, 0, 0, 0),
    },
    "paged": {"paged": (322, 109696, 288, 0, 28864, 0, 8320, 6144, 22912, 0, 9280)},
    "paged, 3 splits": {
        "paged": (386, 110464, 1632, 0, 30912, 0, 24960, 18432, 31616, 0, 9280),
        "combine": (1472, 0, 288, 0, 0, 0, 0, 0, 0, 0, 0),
    },
    "paged_gather": {  # the copy in front of what `paged` moves
        "paged_gather": (75057, 0, 72900, 0, 2278, 0, 145, 0, 0, 0, 0),
        "paged": (322, 109696, 288, 0, 28864, 0, 8320, 6144, 22912, 0, 9280),
    },
    "paged_launches": {"paged": (322, 109696, 288, 0, 28864, 0, 8320, 6144, 22912, 0, 9280)},
    "paged_launches, by page": {
        "page_lengths": (1, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0),
        "paged": (128, 6176, 1904, 0, 5120, 0, 29120, 21504, 16256, 0, 512),
        "combine": (1248, 0, 144, 0, 0, 0, 0, 0, 0, 0, 0),
    },
    # Rows are whole sectors in shared memory too: a third fewer are copied than for `paged`.
    "paged_stream": {"paged_stream": (418, 74944, 1088, 32, 30656, 0, 864, 0, 19968, 0, 9728)},
    # Two warps' tiles are one here, and four multiply it.
    "paged_stream, 80 heads": {"paged_stream": (248, 14112, 5440, 16, 14304, 0, 1632, 0, 4608, 0, 4608)},
    "cascade": {"cascade": (120, 11200, 2584, 0, 4032, 0, 0, 0, 3136, 0, 1344),
                "cascade_merge": (1088, 2560, 1088, 0, 640, 0, 0, 0, 640, 0, 0)},
    # No conflicts: rows of 1152 bytes begin in one bank, and their chunks trade places.
    "mla": {"mla": (438, 35812, 7210, 4, 27241, 0, 418, 0, 9808, 0, 7616)},
    "mla, 80 heads": {"mla": (838, 33352, 20590, 4, 50363, 0, 1044, 0, 10624, 0, 17408)},
    # Here neither: 64 rows are multiplied, of which 16 are heads.
    "mla_hopper": {"mla_hopper": (142, 32832, 5136, 0, 512, 0, 904, 0, 720, 33696, 4752),
                   "mla_hopper_merge": (640, 4096, 2080, 0, 1024, 0, 0, 0, 1024, 0, 0)},
    "mla_hopper, row by row": {"mla_hopper": (153, 31716, 5136, 0, 512, 0, 400, 0, 8496, 33696, 4752),
                               "mla_hopper_merge": (640, 4096, 2080, 0, 1024, 0, 0, 0, 1024, 0, 0)},
    "append": {"append": (480, 0, 384, 0, 0, 0, 0, 0, 0, 0, 0)},
    "append_rope": {"append_rope_q": (2496, 0, 1152, 0, 0, 0, 0, 0, 0, 0, 0)},
    "copy_pages": {"copy_pages": (2112, 0, 2048, 0, 0, 0, 0, 0, 0, 0, 0)},
    "copy": {"probe_copy": (8192, 0, 8192, 0, 0, 0, 0, 0, 0, 0, 0)},
}


@pytest.mark.parametrize("order", ["forward", "shuffle"])
@pytest.mark.parametrize("case", CASES)
def test_pinned(cpu, case, order):
    planned = CASES[case](cpu)
    with cpu.schedule(order=order, seed=3), cpu.tracing() as trace:
        planned.run()
    assert {entry: tuple(sums.values()) for entry, sums in summary(trace.sites).items()} == PINNED[case]
    cost = planned.cost()
    assert trace.total("bytes", "global load", "global copy", "bulk load") == cost.bytes_loaded
    assert trace.total("bytes", "global store", "bulk store") == cost.bytes_stored
    assert trace.launches == cost.launches
