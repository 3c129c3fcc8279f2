"""`python -m cuattn.kernels`: writes the ladder into kernels_cu/README.md between its markers.

One line a kernel.
"""
from __future__ import annotations

from cuattn.kernels import ROWS
from cuattn.paths import KERNELS

BEGIN, END = "<!-- ladder: python -m cuattn.kernels -->\n", "<!-- end of ladder -->"
# As a reader climbs; others follow by name.
LADDER = ("standard", "chunked_unfused", "chunked_fused", "chunked_atomic", "flash",
          "flash_hopper", "paged_launches", "paged_gather", "paged", "paged_stream", "cascade",
          "mla", "mla_hopper")
STEPS = {"Prefill": ("prefill",), "Decode": ("decode", "cascade", "mla"), "The cache": ("cache", "pages"),
         "The device itself": ("probe",)}


def table() -> str:
    """The rows by family, in the order in which they make sense to a reader."""
    place = {name: step for step, name in enumerate(LADDER)}
    lines = ["| kernel | file | runs on | what it teaches |", "| --- | --- | --- | --- |"]
    for title, families in STEPS.items():
        lines.append(f"| **{title}** | | | |")
        for row in sorted(ROWS.values(), key=lambda row: (place.get(row.name, len(place)), row.name)):
            if row.family in families:
                lines.append(f"| `{row.name}` | [{row.file}]({row.file}) | {', '.join(row.archs)} "
                             f"| {row.teaches} |")
    return "\n".join(lines) + "\n"


def updated(text: str) -> str:
    """The README's text with today's table."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    readme = KERNELS / "README.md"
    readme.write_text(updated(readme.read_text(encoding="utf-8")), encoding="utf-8")
