"""Charts of one explanation: bytes, conflicts and barriers by call site, shared memory, the timeline. Pure.

Everything drawn here was counted by the CPU machine, in hollow bars; a closed form is a tick, as elsewhere.
"""

from __future__ import annotations

import altair as alt
import pandas as pd

from dashboard import style
from dashboard.charts_runs import COUNTED, MODELLED, TICK
from experiments.explain import timelines
from experiments.explain.facts import (
    BARRIERS,
    GLOBAL,
    LOADS,
    SHARED,
    STORES,
    SUMMED,
    merged,
    places,
    source_line,
)

ROW = 26  # pixels
KIND = "counted on the CPU machine · no time is modelled"
HOLLOW = {"fillOpacity": 0.16, "strokeWidth": 1.5, "height": {"band": 0.62}}
SI = alt.Axis(labelExpr="format(datum.value, '~s')", tickCount=6)  # not one prefix for all, which writes 0k
PASSES, CONFLICTS = "fewest passes", "conflicts"
MEMBER, WRITTEN, READ = "member", "written by", "read by"


def call_sites(document: dict, accesses: tuple[str, ...] | None = None) -> pd.DataFrame:
    """One row a call site, launches of one entry summed: its counts, and the text of its line.

    `where` is its place, with what it does there in `label`.
    """
    every = tuple(document["glossary"]["accesses"]) if accesses is None else accesses
    sites = merged(document["sites"], every)
    counts = ["entry", "access", *SUMMED]
    rows = [{"where": where, **{name: site[name] for name in counts}, "source": source_line(document, site),
             "label": f"{where} · {site['access'].removeprefix('global ')}"}
            for where, site in zip(places(sites), sites)]
    return pd.DataFrame(rows, columns=["where", *counts, "source", "label"])


def tell(*more: alt.Tooltip) -> list[alt.Tooltip]:
    """What every mark of a call site tells."""
    return [*(style.text(name, name) for name in ("where", "source", "access")), *more]


def bytes_by_site(document: dict):
    """Global bytes by call site, and their sums beside the closed forms."""
    sites = call_sites(document, GLOBAL)
    closed = {row["what"]: row["closed_form"] for row in document["totals"]}
    parts = []
    for name, column, accesses in (("loaded, in all", "bytes_loaded", LOADS),
                                   ("stored, in all", "bytes_stored", STORES)):
        mine = sites[sites["access"].isin(accesses)]
        total = {"label": name, "bytes": mine["bytes"].sum(), "closed_form": closed.get(column), "sum": True}
        parts += [pd.DataFrame([total]), mine.sort_values("bytes", ascending=False, kind="stable")]
    parts.append(sites[~sites["access"].isin((*LOADS, *STORES))])
    frame = pd.concat([part for part in parts if len(part)], ignore_index=True)
    frame = frame[(frame["bytes"] > 0) | (frame.get("closed_form") > 0)]
    if frame.empty:
        return None
    frame["sum"] = frame["sum"].eq(True)
    frame["counted"], frame["modelled"] = COUNTED, MODELLED
    chart = alt.layer(*_bars_with_ticks(frame)).properties(height=alt.Step(ROW), width="container")
    equal = all(row["equal"] for row in document["totals"])
    said = "the sums equal the closed forms to the byte" if equal else "the sums DIFFER from the closed forms"
    words = "Global bytes requested by each call site"
    return style.finish(chart, words, f"{KIND} · {said}", f"{words}; {said}. {_largest(sites, 'bytes', 'B')}")


def _bars_with_ticks(frame: pd.DataFrame) -> list:
    """A hollow bar a row, and a tick at the closed form of a sum."""
    y = style.row_axis("label", frame["label"].tolist())
    x = alt.X(field="bytes", type="quantitative", title="bytes requested of global memory",
              axis=SI)
    key = {"domain": [COUNTED, MODELLED], "range": [style.SKY, style.MUTED]}
    legend = alt.Legend(title="bytes requested", symbolLimit=0, symbolType="square")
    counted = alt.Chart(frame).mark_bar(**HOLLOW).encode(
        x=x, y=y, tooltip=tell(style.number("bytes", "counted, B", ","),
                               style.number("instructions", "instructions", ","),
                               style.number("sectors", "sectors", ",")),
        color=alt.Color(field="counted", type="nominal", scale=alt.Scale(**key), legend=legend),
        stroke=alt.Stroke(field="counted", type="nominal", scale=alt.Scale(**key), legend=None),
    )
    names = alt.Chart(frame).mark_text(align="left", dx=6, fontSize=11, color=style.MUTED).encode(
        x=x, y=y, text=alt.Text(field="bytes", type="quantitative", format=","))
    modelled = alt.Chart(frame[frame["closed_form"].notna()]).mark_point(
        shape=TICK, size=260, strokeWidth=2.5, filled=False
    ).encode(
        x=alt.X(field="closed_form", type="quantitative"), y=y,
        color=alt.Color(field="modelled", type="nominal", scale=alt.Scale(**key), legend=legend),
        tooltip=[style.number("closed_form", "closed form, B", ",")],
    )
    return [counted, modelled, names]


def _largest(frame: pd.DataFrame, column: str, unit: str) -> str:
    """The call site with most of something, in words."""
    if frame.empty or not frame[column].max():
        return "No call site has any."
    top = frame.loc[frame[column].idxmax()]
    return f"Most: {top[column]:,} {unit} at {top['where']} ({top['access']})."


def conflicts(document: dict):
    """Passes through the banks of shared memory: those that data needs, and those that conflicts add."""
    sites = call_sites(document, SHARED)
    sites = sites[sites["wavefronts"] > 0]
    if sites.empty:
        return None
    long = pd.concat([sites.assign(part=PASSES, passes=sites["wavefronts"] - sites["conflicts"], place=0),
                      sites.assign(part=CONFLICTS, passes=sites["conflicts"], place=1)])
    long = long[long["passes"] > 0]
    key = {"domain": [PASSES, CONFLICTS], "range": [style.SKY, style.VERMILLION]}
    scale, legend = alt.Scale(**key), alt.Legend(title="passes", symbolLimit=0, symbolType="square")
    y = style.row_axis("label", sites["label"].tolist())
    bars = alt.Chart(long).mark_bar(**HOLLOW).encode(
        x=alt.X(field="passes", type="quantitative", stack="zero", axis=SI,
                title="passes through the banks (wavefronts)"),
        y=y, order=alt.Order(field="place", type="quantitative"),
        color=alt.Color(field="part", type="nominal", scale=scale, legend=legend),
        stroke=alt.Stroke(field="part", type="nominal", scale=scale, legend=None),
        tooltip=tell(style.number("wavefronts", "passes in all", ","), style.number("bytes", "bytes", ","),
                     style.number("conflicts", "of them conflicts", ",")),
    )
    sites = sites.assign(text=[f"{f / w:.0%} conflicts" if f else "" for f, w in
                               zip(sites["conflicts"], sites["wavefronts"])])
    names = alt.Chart(sites).mark_text(align="left", dx=6, fontSize=11, color=style.VERMILLION).encode(
        x=alt.X(field="wavefronts", type="quantitative"), y=y, text="text:N")
    chart = alt.layer(bars, names).properties(height=alt.Step(ROW), width="container")
    total, worse = int(sites["wavefronts"].sum()), int(sites["conflicts"].sum())
    said = f"{worse:,} of {total:,} passes are conflicts" if worse else "no call site has a conflict"
    words = "Passes through the banks of shared memory by call site"
    return style.finish(chart, words, f"counted · {said}",
                        f"{words}: {said}. {_largest(sites, 'conflicts', 'conflicts')}")


def barriers(document: dict):
    """How often warps arrived at barriers and fences, by call site."""
    sites = call_sites(document, BARRIERS)
    if sites.empty:
        return None
    y = style.row_axis("label", sites["label"].tolist())
    x = alt.X(field="instructions", type="quantitative", title="arrivals of a warp",
              axis=alt.Axis(tickMinStep=1, tickCount=6))
    base = alt.Chart(sites).encode(x=x, y=y, tooltip=tell(style.number("instructions", "arrivals", ",")))
    bars = base.mark_bar(color=style.SKY, stroke=style.SKY, **HOLLOW)
    names = base.mark_text(align="left", dx=6, fontSize=11, color=style.MUTED).encode(
        text=alt.Text(field="instructions", type="quantitative", format=","))
    chart = alt.layer(bars, names).properties(height=alt.Step(ROW), width="container")
    words = "Barriers and fences by call site, arrivals of a warp"
    return style.finish(chart, words, KIND, f"{words}. {_largest(sites, 'instructions', 'arrivals')}")


# --- shared memory


def shared_rows(document: dict, part: dict) -> pd.DataFrame:
    """One row a member of a launch's shared memory, then one a call site and what it does there."""
    made = [{"label": member["name"] + (f"[{member['count']}]" if member["count"] > 1 else ""),
             "kind": MEMBER, "first": member["offset"], "end": member["offset"] + member["size"],
             "what": member["type"], "source": "", "bytes": member["size"]} for member in part["members"]]
    touched = sorted({i for member in part["members"] for i in (*member["written_by"], *member["read_by"])})
    sites = [document["sites"][i] for i in touched]
    for i, site, where in zip(touched, sites, places(sites)):
        does = [kind for kind, who in ((WRITTEN, "written_by"), (READ, "read_by"))
                if any(i in member[who] for member in part["members"])]
        made += [{"label": f"{where} · {site['access']}", "kind": kind, "first": site["first"],
                  "end": site["end"], "what": site["access"], "source": source_line(document, site),
                  "bytes": site["end"] - site["first"]} for kind in does]
    order = {MEMBER: 0, WRITTEN: 1, READ: 2}
    frame = pd.DataFrame(made)
    return frame.sort_values("kind", key=lambda kinds: kinds.map(order), kind="stable", ignore_index=True)


def shared_map(document: dict, part: dict):
    """Where the members of a launch's shared memory lie, and which bytes each call site touched."""
    if not part["members"]:
        return None
    frame = shared_rows(document, part)
    key = {"domain": [MEMBER, WRITTEN, READ], "range": [style.MUTED, style.VERMILLION, style.BLUE]}
    scale = alt.Scale(**key)
    legend = alt.Legend(title="bytes", symbolLimit=0, symbolType="square")
    step = next(size for size in (2**k for k in range(2, 40)) if part["bytes"] / size <= 8)
    ticks = list(range(0, part["bytes"] + 1, step))
    x = alt.X(field="first", type="quantitative", title="byte of the block's shared memory",
              scale=alt.Scale(domain=[0, part["bytes"]], nice=False),
              axis=alt.Axis(values=ticks, labelExpr=style.BINARY_TICKS))
    y = style.row_axis("label", list(dict.fromkeys(frame["label"])))
    bars = alt.Chart(frame).mark_bar(**HOLLOW).encode(
        x=x, x2=alt.X2("end"), y=y,
        color=alt.Color(field="kind", type="nominal", scale=scale, legend=legend),
        stroke=alt.Stroke(field="kind", type="nominal", scale=scale, legend=None),
        tooltip=[style.text("label", "what"), style.text("what", "type or access"),
                 style.text("source", "source"), style.number("first", "first byte", ","),
                 style.number("end", "up to byte", ","), style.number("bytes", "bytes", ",")],
    )
    chart = bars.properties(height=alt.Step(ROW - 2), width="container")
    words = f"Shared memory of {part['entry']}: struct {part['struct']}, {part['bytes']:,} B"
    kind = "where the compiler puts each member · bytes that call sites touched, from the first to the last"
    names = ", ".join(f"{m['name']} at byte {m['offset']:,}, {m['size']:,} B" for m in part["members"])
    return style.finish(chart, words, kind, f"{words}. Members: {names}.")


def timeline(document: dict, launch: int):
    """What each warp of the traced block did from barrier to barrier."""
    chart = timelines.chart(document["timeline"]["steps"], launch)
    if chart is None:
        return None
    mine = [step for step in document["timeline"]["steps"] if step["launch"] == launch]
    words = f"Steps of {mine[0]['entry']}, block {document['timeline']['block']}: each warp between barriers"
    said = f"{words}. {' '.join(timelines.lines(mine))}"
    return style.finish(chart, words, f"{KIND} · darker is nearer the panel's largest", said[:900])
