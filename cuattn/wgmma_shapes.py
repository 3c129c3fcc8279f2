"""Writes the shapes of wgmma into `kernels_cu/prim/wgmma.cuh`: python -m cuattn.wgmma_shapes.

PTX names each of a product's up to 128 accumulators, so every width is a text of its own. They stand between
two marks of the header; what is around them is written by hand.
"""
from __future__ import annotations

from cuattn.paths import KERNELS

#: Widths n of m64nNk16 that kernels use.
SHAPES = (8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256)
HEADER = KERNELS / "prim" / "wgmma.cuh"
BEGIN, END = "// <shapes>: written by `python -m cuattn.wgmma_shapes`\n", "// </shapes>\n"


def _registers() -> list[str]:
    """REGISTERS_n: the numbers of a shape's accumulators as text, those of the shape before in front."""
    lines, before = [], 0
    for n in SHAPES:
        names = ", ".join(f"%{i}" for i in range(before // 2, n // 2))
        lines.append(f'#define REGISTERS_{n} REGISTERS_{before} ", {names}"' if before else
                     f'#define REGISTERS_{n} "{names}"')
        before = n
    return lines


def _operands(tiles: int) -> list[str]:
    """Accumulator tiles 0 … tiles − 1 as macro calls, the largest powers of two first."""
    calls, first = [], 0
    for power in (16, 8, 4, 2, 1):
        while tiles - first >= power:
            calls.append(f"D{power}({first})")
            first += power
    return calls


def shapes() -> str:
    """The text between the marks."""
    lines = ["// clang-format off",
             '#define D1(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])']
    lines += [f"#define D{n}(i) D{n // 2}(i), D{n // 2}(i + {n // 2})" for n in (2, 4, 8, 16)]
    lines += _registers()
    for n in SHAPES:
        lines.append(f"#define OPERANDS_{n} {', '.join(_operands(n // 8))}")
    for n in SHAPES:
        numbers = ", ".join(f'"%{n // 2 + i}"' for i in range(7))
        lines.append(f"WGMMA_SHAPE({n}, REGISTERS_{n}, OPERANDS_{n}, {numbers});")
    lines += [f"#undef D{n}" for n in (1, 2, 4, 8, 16)]
    lines += [f"#undef {name}_{n}" for n in SHAPES for name in ("REGISTERS", "OPERANDS")]
    lines.append("// clang-format on")
    return "\n".join(lines) + "\n"


def header(text: str) -> str:
    """The header with its shapes written anew."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + shapes() + END + rest.split(END)[1]


if __name__ == "__main__":
    HEADER.write_text(header(HEADER.read_text(encoding="utf-8")), encoding="utf-8")
