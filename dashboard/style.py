"""How every chart looks: a colour and a shape a kernel, a colour a status, shared axes and number formats.

Colours are fixed by name, never by position, so a kernel keeps its colour whatever is filtered away.
"""

from __future__ import annotations

import math

import altair as alt

BLUE, VERMILLION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, OLIVE, SLATE = "#E69F00", "#56B4E9", "#8A6D00", "#5F6B76"
FAINT = "#B8C1CA"
INK = "#1F2933"
# Read as well on a light page as on a dark one.
MUTED, GRID = "#6E7A86", "rgba(128, 140, 152, 0.2)"

# The toolkit's own kernels are circles and squares; libraries it is compared with are triangles and diamonds.
KERNELS = {
    "flash": (BLUE, "circle"),
    "flash_hopper": (BLUE, "square"),
    "standard": (VERMILLION, "square"),
    "chunked_unfused": (SKY, "square"),
    "chunked_fused": (GREEN, "square"),
    "chunked_atomic": (PURPLE, "circle"),
    "paged": (GREEN, "circle"),
    "paged_stream": (BLUE, "circle"),
    "paged_gather": (ORANGE, "square"),
    "paged_launches": (VERMILLION, "circle"),
    "mla": (GREEN, "circle"),
    "mla_hopper": (BLUE, "square"),
    "torch_math": (ORANGE, "triangle-up"),
    "torch_flash": (SKY, "triangle-down"),
    "torch_cudnn": (PURPLE, "diamond"),
    "fa3": (ORANGE, "triangle-right"),
    "fa3_decode": (ORANGE, "triangle-right"),
    "flashinfer": (OLIVE, "triangle-left"),
    "flashinfer_decode": (OLIVE, "triangle-left"),
    "flashinfer_cascade": (OLIVE, "triangle-left"),
    "vllm_decode": (PURPLE, "triangle-up"),
    "append": (BLUE, "square"),
    "append_rope": (GREEN, "square"),
    "flashinfer_append": (OLIVE, "triangle-left"),
    "copy_pages": (SKY, "square"),
    "torch_copy": (PURPLE, "triangle-down"),
    "copy": (SLATE, "square"),
    "read": (SKY, "circle"),
    "words": (PURPLE, "square"),
    "mma": (OLIVE, "circle"),
    "empty": (SLATE, "circle"),
}
OWN = (
    "flash",
    "flash_hopper",
    "standard",
    "chunked_unfused",
    "chunked_fused",
    "chunked_atomic",
    "paged",
    "paged_stream",
    "paged_gather",
    "paged_launches",
    "mla",
    "mla_hopper",
    "append",
    "copy",
    "read",
    "words",
    "mma",
    "empty",
)
OTHER_COLOURS = (ORANGE, SKY, PURPLE, OLIVE, SLATE, GREEN, VERMILLION, BLUE)
OTHER_SHAPES = ("triangle-up", "triangle-down", "cross", "diamond", "triangle-right", "triangle-left")

STATUSES = {
    "ok": "#6BA292",
    "incorrect": "#D55E00",
    "crash": "#9C2A00",
    "cuda_error": "#B8472A",
    "compile_error": "#CC79A7",
    "oom": "#E69F00",
    "timeout": "#8A6D00",
    "throttled": "#F0C808",
    "interrupted": "#56B4E9",
    "unsupported": "#B8C1CA",
}
OTHER_STATUS = "#5F6B76"

# A verdict on a claim: its colour, and a sign that says the same.
VERDICTS = {
    "confirmed": (GREEN, "✓"),
    "refuted": (VERMILLION, "✗"),
    "depends": (ORANGE, "±"),
    "not tested": (FAINT, "–"),
}
# How a number is known: a mark of its own, and whether it is filled.
KNOWN = {
    "measured": ("circle", True),
    "counted": ("circle", False),
    "modelled": ("stroke", False),
    "compared": ("diamond", False),
    "inferred": ("triangle-up", False),
}

MODE_DASH = {"launch": [1, 0], "graph": [5, 4]}
ORDER_DASH = {"sorted": [1, 0], "shuffled": [5, 4]}

BINARY_TICKS = "datum.value >= 1024 ? format(datum.value / 1024, '~g') + 'K' : format(datum.value, '~g')"


def kernel_table(kernels) -> dict[str, tuple[str, str]]:
    """Colour and shape of every known kernel and of `kernels`; unknown names are placed in sorted order."""
    return mark_table(KERNELS, kernels)


def kernel_colour(kernels, title: str = "kernel (measured)", **more) -> alt.Color:
    """Colour encoding over the whole domain; the legend lists only what the chart shows."""
    table = kernel_table(kernels)
    present = sorted(set(map(str, kernels)), key=list(table).index)
    return alt.Color(
        field="kernel",
        type="nominal",
        scale=alt.Scale(domain=list(table), range=[colour for colour, _ in table.values()]),
        legend=alt.Legend(title=title, values=present, symbolLimit=0, **more),
    )


def kernel_shape(kernels, title: str = "kernel (measured)", **more) -> alt.Shape:
    """Shape encoding that says the same as the colour, for readers who cannot tell the colours apart."""
    table = kernel_table(kernels)
    present = sorted(set(map(str, kernels)), key=list(table).index)
    return alt.Shape(
        field="kernel",
        type="nominal",
        scale=alt.Scale(domain=list(table), range=[shape for _, shape in table.values()]),
        legend=alt.Legend(title=title, values=present, symbolLimit=0, **more),
    )


# Head dims, dtypes of sums and of caches have a mark each, as kernels do.
HEAD_DIMS = {
    "D64": (BLUE, "circle"),
    "D80": (VERMILLION, "square"),
    "D96": (GREEN, "triangle-up"),
    "D128": (PURPLE, "diamond"),
    "D256": (ORANGE, "triangle-down"),
}
SUMS = {
    "float16": (VERMILLION, "triangle-up"),
    "bfloat16": (PURPLE, "diamond"),
    "float32": (BLUE, "square"),
}
CACHES = {
    "bfloat16": (BLUE, "circle"),
    "float16": (SKY, "diamond"),
    "float8_e4m3": (VERMILLION, "square"),
    "int8": (GREEN, "triangle-up"),
}


def mark_table(fixed: dict[str, tuple[str, str]], names) -> dict[str, tuple[str, str]]:
    """`fixed`, and a colour and shape for every name it lacks, in sorted order."""
    table = dict(fixed)
    for place, name in enumerate(sorted(set(map(str, names)) - set(table))):
        table[name] = (OTHER_COLOURS[place % len(OTHER_COLOURS)], OTHER_SHAPES[place % len(OTHER_SHAPES)])
    return table


def marks(field: str, fixed: dict[str, tuple[str, str]], names, title: str):
    """Colour and shape encodings of a named quantity, as those of kernels are."""
    table = mark_table(fixed, names)
    present = sorted(set(map(str, names)), key=list(table).index)
    legend = alt.Legend(title=title, values=present, symbolLimit=0)
    common = {"field": field, "type": "nominal", "legend": legend}
    colours, shapes = ([look[place] for look in table.values()] for place in (0, 1))
    return (
        alt.Color(scale=alt.Scale(domain=list(table), range=colours), **common),
        alt.Shape(scale=alt.Scale(domain=list(table), range=shapes), **common),
    )


def status_colour(statuses) -> alt.Color:
    """Colour encoding of outcomes; an unknown status is grey, not missing."""
    table = dict(STATUSES)
    for name in sorted(set(map(str, statuses)) - set(table)):
        table[name] = OTHER_STATUS
    present = [name for name in table if name in set(statuses)]
    return alt.Color(
        field="status",
        type="nominal",
        scale=alt.Scale(domain=list(table), range=list(table.values())),
        legend=alt.Legend(title="status", values=present, symbolLimit=0, symbolType="square"),
    )


def verdict_colour(verdicts, title: str = "verdict") -> alt.Color:
    """Colour encoding of verdicts; the legend lists only what the chart shows."""
    present = [name for name in VERDICTS if name in set(verdicts)]
    colours = [colour for colour, _ in VERDICTS.values()]
    return alt.Color(
        field="verdict",
        type="nominal",
        scale=alt.Scale(domain=list(VERDICTS), range=colours),
        legend=alt.Legend(title=title, values=present, symbolLimit=0, symbolType="square"),
    )


def stale_opacity(full: float = 1.0) -> alt.Opacity:
    """Rows whose kernel has changed since are drawn faint."""
    return alt.condition("datum.stale === true", alt.value(0.3), alt.value(full))


def number(field: str, title: str, fmt: str = ",.4~g") -> alt.Tooltip:
    """Tooltip line for a quantity."""
    return alt.Tooltip(field=field, type="quantitative", title=title, format=fmt)


def text(field: str, title: str) -> alt.Tooltip:
    """Tooltip line for a name."""
    return alt.Tooltip(field=field, type="nominal", title=title)


def origin() -> list[alt.Tooltip]:
    """Tooltip lines for where a row comes from."""
    return [text("device", "device"), text("stale", "stale"), text("run_id", "run")]


def log2_x(field: str, title: str, values) -> alt.X:
    """Base-2 axis with a tick at each value that occurs; the caller has removed zeros."""
    ticks = sorted({int(v) for v in values})
    while len(ticks) > 9:
        ticks = ticks[::2]
    return alt.X(
        field=field,
        type="quantitative",
        title=title,
        scale=alt.Scale(type="log", base=2, nice=False, padding=16),
        axis=alt.Axis(values=ticks, labelExpr=BINARY_TICKS, grid=False, labelOverlap=True),
    )


def row_axis(field: str, order: list[str]) -> alt.Y:
    """One named row after another, in the given order."""
    axis = alt.Axis(domain=False, ticks=False, grid=True)
    return alt.Y(field=field, type="nominal", sort=order, title=None, axis=axis)


def log_x(field: str, title: str, values, fmt: str = "~g", room: float = 1.4) -> alt.X:
    """Base-10 axis over at least a decade, so that near values look near; `room` is the factor kept free."""
    return alt.X(field=field, type="quantitative", title=title, **_decades(values, fmt, room))


def log_y(field: str, title: str, values, fmt: str = "~g", room: float = 1.4) -> alt.Y:
    """As `log_x`, upright."""
    return alt.Y(field=field, type="quantitative", title=title, **_decades(values, fmt, room))


def _decades(values, fmt: str, room: float) -> dict:
    low, high = min(values) / room, max(values) * room
    widen = math.sqrt(max(1.0, 10 * low / high))
    low, high = low / widen, high * widen
    steps = (1, 2, 5) if high / low < 1000 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [step * 10.0**power for power in powers for step in steps]
    return {
        "scale": alt.Scale(type="log", nice=False, domain=[low, high]),
        "axis": alt.Axis(
            format=fmt, values=[tick for tick in ticks if low <= tick <= high], labelOverlap=True
        ),
    }


def title(words: str, kind: str) -> alt.TitleParams:
    """A title that says what and in which unit, above a line that says how the numbers came to be."""
    return alt.TitleParams(
        words,
        subtitle=kind,
        anchor="start",
        fontSize=16,
        fontWeight=600,
        subtitleFontSize=12.5,
        subtitleColor=MUTED,
        offset=14,
        subtitlePadding=5,
    )


AXIS = {
    "gridColor": GRID,
    "domainColor": FAINT,
    "tickColor": FAINT,
    "labelFontSize": 12,
    "titleFontSize": 12,
    "titleFontWeight": "normal",
    "titleColor": MUTED,
    "titlePadding": 10,
    "labelLimit": 330,
}
LEGEND = {
    "labelFontSize": 12,
    "titleFontSize": 12,
    "titleFontWeight": "normal",
    "titleColor": MUTED,
    "symbolSize": 90,
    "symbolOpacity": 1,
    "labelLimit": 320,
    "orient": "top",
    "direction": "horizontal",
    "offset": 12,
}
HEADER = {
    "labelFontSize": 12.5,
    "labelFontWeight": 600,
    "labelAnchor": "start",
    "labelPadding": 12,
    "labelExpr": "split(datum.label, '\\n')",
    "labelLineHeight": 16,
    "labelLimit": 320,
    "title": None,
}
CONFIG = {"view": {"stroke": None}, "axis": AXIS, "legend": LEGEND, "header": HEADER}


def finish(chart, words: str, kind: str, description: str):
    """Title, description (read aloud by screen readers) and the common look of axes.

    Set on the chart itself: Altair's `configure_…` methods copy the whole chart each time.
    """
    chart.title, chart.description, chart.config = title(words, kind), description, CONFIG
    return chart
