"""Where the members of a kernel's shared memory lie: names from the source, numbers from the compiler."""
from __future__ import annotations

import pytest

from cuattn import compile as compiler
from cuattn import devices, kernels
from cuattn.kernels.base import Launch
from cuattn.kernels.shapes import AttentionShape, DecodeShape
from cuattn.layout import LayoutUnknown, members_of, shared_layout

DENSE = AttentionShape(1, 4, 2, 128, 256, 64, "float16")
DECODE = DecodeShape(1, 4, 2, 64, 16, 16, "float16")
LAUNCHES = {f"{name} {launch.entry}": launch
            for name, shape in (("flash", DENSE), ("standard", DENSE), ("paged", DECODE))
            for launch in kernels.find(name).plan(shape, devices.CPU).launches}

ODD = """
struct alignas(128) Smem {
  alignas(16) float m[ROWS], l[ROWS], o[ROWS][COLS];
  SmemTile<Element, BLOCK / PARTS, round_up(D, 16)> k[PARTS];
  static constexpr int SIZE = 3;
  METHOD int at(int x) const { return x; }
  METHOD explicit Smem() : m(3) {}
  union {
    Stage ring[PARTS][2];
    struct { int a; float b[2]; };
    struct Inner { int hidden; } state[PARTS], other;
  };
  struct Never { int hidden; };
  uint64_t full[2] = {0}, empty[2];
  const Element* p;
  int flag = 3;
};
"""


@pytest.mark.parametrize("name", LAUNCHES)
def test_members_fill_the_struct_that_the_plan_asks_for(name):
    launch = LAUNCHES[name]
    layout = shared_layout(launch)
    if not launch.smem_bytes:
        assert layout is None
        return
    assert layout.bytes == launch.smem_bytes
    assert layout.members[0].offset == 0
    assert max(member.offset + member.size for member in layout.members) == layout.bytes
    assert all(member.size % member.count == 0 for member in layout.members)


def test_arrays_are_one_member_with_their_elements():
    q, k, v = shared_layout(LAUNCHES["flash flash"]).members
    assert (q.name, q.count, k.name, k.count, v.name, v.count) == ("q", 1, "k", 2, "v", 2)
    assert (k.offset, v.offset) == (q.size, q.size + k.size)


def test_members_of_a_union_share_their_bytes():
    q, ring, state = shared_layout(LAUNCHES["paged paged"]).members
    assert (ring.name, state.name) == ("ring", "state")
    assert ring.offset == state.offset == q.size and ring.size > state.size


def test_members_are_found_among_everything_a_struct_may_hold():
    names = [name for _, name in members_of(ODD, "Smem")]
    assert names == ["m", "l", "o", "k", "ring", "a", "b", "state", "other", "full", "empty", "p", "flag"]
    assert dict((name, kind) for kind, name in members_of(ODD, "Smem"))["k"].startswith("SmemTile<Element")


def source(tmp_path, text: str, smem_bytes: int = 64) -> Launch:
    file = tmp_path / "mine.cu"
    file.write_text('#include "prim/smem.cuh"\n' + text)
    return Launch(str(file), "mine", (1, 1, 1), 32, smem_bytes, {"COUNT": 4})


def test_names_in_comments_and_strings_are_none(tmp_path):
    text = """
    // struct Smem { int wrong; };
    /* dynamic_smem<Other>() */
    struct Smem { char pad; double sum[COUNT]; /* int unused; */ };
    static_assert(sizeof(Smem) > 0, "struct Smem { int wrong; };");
    KERNEL(32, 1) mine() { Smem& s = dynamic_smem<Smem>(); s.sum[0] = 1; }
    """
    layout = shared_layout(source(tmp_path, text))
    assert [(m.name, m.offset, m.size, m.count) for m in layout.members] == [("pad", 0, 1, 1),
                                                                             ("sum", 8, 32, 4)]
    assert layout.bytes == 40


@pytest.mark.parametrize("text, why", [
    ("KERNEL(32, 1) mine() {}", "no dynamic_smem"),
    ("struct A { int a; }; struct B { int b; };"
     "KERNEL(32, 1) mine() { dynamic_smem<A>(); dynamic_smem<B>(); }", "where one is expected"),
    ("struct Base { int a; }; struct Smem : Base { int b; };"
     "KERNEL(32, 1) mine() { dynamic_smem<Smem>(); }", "it has a base"),
    ("KERNEL(32, 1) other() {}", "defines no KERNEL mine"),
])
def test_what_cannot_be_told_is_a_sentence(tmp_path, text, why):
    with pytest.raises(LayoutUnknown, match=why):
        shared_layout(source(tmp_path, text))


def test_the_kernel_itself_is_another_build():
    launch = LAUNCHES["flash flash"]
    built = compiler.build(launch.file, launch.entry, launch.constants, "cpu")
    table = compiler.build(launch.file, launch.entry, launch.constants, "cpu", "constexpr int TABLE = 1;")
    assert built.path != table.path and built.source_hash == table.source_hash
