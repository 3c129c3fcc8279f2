"""Kernel: one kernel's source, plan and counters, as `explain` found them on the CPU machine."""

from __future__ import annotations

import json

import pandas as pd
import streamlit as st

from dashboard import charts_kernel, data, source_view, views
from experiments.explain import timelines
from experiments.explain.facts import FULL, FULL_MEANS, GLOBAL, notes, sentences

MAKE_ONE = "python -m experiments explain flash --out runs/explain-flash"


def page() -> None:
    views.heading("Kernel", "What does each line do, and does the kernel request the bytes its cost says?")
    found, unreadable = data.explanations()
    for file, reason in unreadable:
        st.warning(f"`{file}` is set aside: {reason}.", icon=":material/report:")
    if not found:
        st.info("There is no explanation to show; the command below makes one.")
        st.code(MAKE_ONE, language="bash")
        return
    chosen = choose(found)
    document = chosen.document
    state(chosen)
    numbers(document)
    plan(document)
    charts(document)
    source(document)
    shared(document)
    steps(document)
    glossary(document)
    again(chosen)


def choose(found: list[data.Explained]) -> data.Explained:
    """The kernel, then what it was explained on; the reader's own come first."""
    with views.choices():
        kernels = list(dict.fromkeys(one.document["kernel"] for one in found))
        kernel = views.choose("Kernel", sorted(kernels), "explained_kernel", "flash")
        mine = [one for one in found if one.document["kernel"] == kernel]
        names: dict[str, data.Explained] = {}
        for one in mine:
            name = one.document["title"] + (" (recorded)" if one.origin == data.SHIPPED else "")
            names.setdefault(name if name not in names else f"{name} · {data.short(one.path.parent)}", one)
        return names[views.choose("Shape and options", list(names), f"explained_on_{kernel}")]


def state(chosen: data.Explained) -> None:
    """What it teaches, and whether the source is still today's."""
    document = chosen.document
    st.markdown(f"**{document['kernel']}** on {document['title']}. {document['teaches']}")
    if chosen.stale:
        st.warning("*Stale*: the kernel has changed since. The source and the counts below belong together, "
                   "and are those of the explanation.", icon=":material/history:")
    elif chosen.stale is None:
        st.caption("Whether the kernel has changed since is unknown: its sources cannot be read here.")


def numbers(document: dict) -> None:
    """The totals at one glance, and what follows from them."""
    counted = {row["what"]: row["counted"] for row in document["totals"]}
    intensity = document["intensity"]["flops_per_byte"]
    conflicts = sum(site["conflicts"] for site in document["sites"])
    cells = st.columns(5)
    for cell, (label, value) in zip(cells, (
        ("Counted loaded, B", f"{counted['bytes_loaded']:,}"),
        ("Counted stored, B", f"{counted['bytes_stored']:,}"),
        ("Useful flop per byte", "–" if not intensity else f"{intensity:.3g}"),
        ("Bank conflicts", f"{conflicts:,}"),
        ("Barriers", f"{document['counters'].get('barriers', 0):,}"),
    )):
        cell.metric(label, value, border=True)
    right = document["verdict"]["ok"] and all(row["equal"] for row in document["totals"])
    (st.success if right else st.error)(" ".join(sentences(document)),
                                        icon=":material/check_circle:" if right else ":material/error:")


def plan(document: dict) -> None:
    st.header("Plan")
    rows = [{"launch": str(launch["launch"]), "entry": launch["entry"], "file": launch["file"],
             "grid": " × ".join(map(str, launch["grid"])), "threads a block": launch["block"],
             "shared memory, B": f"{launch['smem_bytes']:,}",
             "compiled with": " ".join(f"{name}={value}" for name, value in launch["constants"].items())}
            for launch in document["plan"]["launches"]]
    if not rows:
        st.info("No launch: there is nothing to do.")
        return
    st.table(pd.DataFrame(rows).set_index("launch"))
    said = [f"{name} = {value}" for name, value in document["plan"]["constants"].items()]
    if document["plan"]["scratch_bytes"]:
        said.append(f"scratch {document['plan']['scratch_bytes']:,} B")
    st.caption("Chosen: " + ", ".join(said) if said else "The plan has nothing to choose.")


def charts(document: dict) -> None:
    """Bytes, conflicts and barriers by call site, with one table behind them."""
    st.header("Bytes by call site, counted")
    views.draw(charts_kernel.bytes_by_site(document), "site-bytes", "It requests no byte of global memory.")
    sites = charts_kernel.call_sites(document)
    if len(sites):
        table = sites.drop(columns="label")
        full = sites["bytes"] / sites["sectors"].where(sites["sectors"] > 0)
        full = full.where(sites["access"].isin(GLOBAL)).astype("float64").round(1)
        table.insert(table.columns.get_loc("sectors") + 1, FULL, full)
        views.behind(table, "call-sites", [document["command"]])
        st.caption(f"{FULL}: {FULL_MEANS}.")
    left, right = st.columns(2, gap="medium")
    with left:
        st.header("Bank conflicts")
        views.draw(charts_kernel.conflicts(document), "conflicts", "It uses no shared memory.")
    with right:
        st.header("Barriers")
        views.draw(charts_kernel.barriers(document), "barriers", "It has no barrier and no fence.")


def source(document: dict) -> None:
    """The source that was run, with its counts."""
    st.header("Source")
    with views.choices():
        file = views.choose("File", list(document["files"]), "explained_file")
        only = st.toggle("Only lines with counts", key="explained_only", bind="query-params")
    if file:
        st.html(source_view.view(document, file, only))


def shared(document: dict) -> None:
    st.header("Shared memory")
    parts = {f"launch {part['launch']}, {part['entry']}": part
             for part in document["shared"] if part["members"]}
    for why in dict.fromkeys(f"{part['entry']}: {part['why']}" for part in document["shared"] if part["why"]):
        st.caption(f"{why}.")
    if not parts:
        return
    part = parts[views.choose("Launch", list(parts), "explained_shared")]
    views.draw(charts_kernel.shared_map(document, part), "shared-map", "Its members are not known.")
    for line in notes(part):
        st.caption(line)
    named = {"label": "member or call site", "first": "first byte", "end": "up to byte",
             "what": "type or access"}
    table = charts_kernel.shared_rows(document, part).rename(columns=named)
    views.behind(table, "shared-memory", [document["command"]])


def steps(document: dict) -> None:
    """The timeline of one block: chart, the same as text, and the steps as a table."""
    st.header("Timeline of a block")
    taken = document["timeline"]["steps"]
    if not taken:
        st.info("No launch has such a block.")
        return
    entries = {step["launch"]: step["entry"] for step in taken}
    names = {f"{timelines.named('launch', launches)}, {entries[first]}": first
             for first, launches in timelines.alike(taken).items()}
    launch = names[views.choose("Launch", list(names), "explained_launch")]
    mine = [step for step in taken if step["launch"] == launch]
    views.draw(charts_kernel.timeline(document, launch), "timeline",
               "Between its barriers no warp copied, loaded or multiplied anything.")
    with st.expander("The same as text", icon=":material/notes:"):
        st.code("\n".join(timelines.lines(mine)), language=None, wrap_lines=True)
    views.behind(pd.DataFrame(mine), "steps", [document["command"]])


def glossary(document: dict) -> None:
    """Every counter's meaning, in the machine's own words."""
    st.header("What is counted")
    kinds = {"accesses": "what a call site does", "columns": "count of a call site",
             "steps": "count of a step", "counters": "count of a run"}
    rows = [{"name": name, "is": kinds[kind], "means": str(meaning)}
            for kind in kinds for name, meaning in document["glossary"][kind].items()]
    with st.expander(f"Glossary ({views.some(len(rows), 'name')})", icon=":material/menu_book:"):
        st.dataframe(pd.DataFrame(rows), hide_index=True, alt="Every counter's name, meaning and unit.")
        st.caption("What Nsight Compute counts of the same kernels on an H200, and where and why it differs: "
                   "`kernels_cu/simt/README.md`, *Beside Nsight Compute*.")


def again(chosen: data.Explained) -> None:
    """The command that makes it again, and the document itself."""
    st.header("Make it again")
    st.code(chosen.document["command"], language="bash")
    st.download_button(
        "Download the document", json.dumps(chosen.document, ensure_ascii=False, indent=1).encode(),
        f"explain-{chosen.document['kernel']}.json", "application/json", icon=":material/download:",
        on_click="ignore")
    st.caption(f"From `{data.short(chosen.path)}`; source hash {chosen.document['source_hash']}.")


page()
