"""What every page is made of: the run picker, a chart with its table, download and command, empty states."""

from __future__ import annotations

import shlex

import altair as alt
import pandas as pd
import streamlit as st

from dashboard import charts_runs, data, rows

TABLE_COLUMNS = (
    "suite",
    "step",
    "kernel",
    "variant",
    "shape",
    "status",
    "error",
    "device",
    "dtype",
    "chunk",
    "chunks",
    "accumulate",
    "gain",
    "measured_time_us",
    "measured_time_q1_us",
    "measured_time_q3_us",
    "mean_us",
    "measured_p99_us",
    "measured_n_samples",
    "x_standard",
    "x_flash",
    "measured_tokens_per_s",
    "tflops",
    "gbps",
    "tensor_use",
    "bandwidth_use",
    "measured_sm_busy",
    "launch_share",
    "tail",
    "intensity",
    "roof",
    "of_roof",
    "binds",
    "max_err",
    "tolerance",
    "margin",
    "lse_err",
    "peak_gb",
    "formula_gb",
    "mode",
    "cache_mode",
    "key_order",
    "kv_dtype",
    "page_order",
    "sorted",
    "shuffled",
    "ratio",
    "of_plain",
    "lengths_source",
    "tokens",
    "counted_bytes_loaded",
    "counted_bytes_stored",
    "counted_launches",
    "modelled_launches",
    "modelled_flops",
    "modelled_bytes_loaded",
    "modelled_bytes_stored",
    "stale",
    "run_id",
    "case_id",
)
LABELS = {
    "chunk": "chunk, keys",
    "accumulate": "dtype of sums",
    "key_order": "order of keys",
    "kv_dtype": "quantised cache",
    "intensity": "modelled flop per byte",
    "roof": "measured roof, TFLOP/s",
    "of_roof": "measured share of the roof",
    "binds": "roof is of",
    "max_err": "largest error against float64",
    "lse_err": "largest error of the LSE",
    "margin": "error ÷ tolerance",
    "gain": "measured default ÷ best",
    "measured_time_us": "measured median, µs",
    "measured_time_q1_us": "measured q1, µs",
    "measured_time_q3_us": "measured q3, µs",
    "mean_us": "measured mean, µs",
    "measured_p99_us": "measured p99, µs",
    "sorted": "measured median with sorted pages, µs",
    "shuffled": "measured median with shuffled pages, µs",
    "ratio": "shuffled ÷ sorted",
    "of_plain": "measured ÷ that over a plain cache",
    "measured_n_samples": "samples",
    "x_standard": "measured × standard",
    "x_flash": "measured × flash",
    "tensor_use": "measured tensor use",
    "bandwidth_use": "modelled bandwidth use",
    "measured_sm_busy": "measured SMs busy",
    "launch_share": "modelled launch share",
    "tail": "measured p99 ÷ median",
    "measured_tokens_per_s": "measured, attention only, token/s",
    "tflops": "measured TFLOP/s",
    "gbps": "modelled GB/s",
    "peak_gb": "measured peak, GB",
    "formula_gb": "modelled peak, GB",
    "counted_bytes_loaded": "counted loaded, B",
    "counted_bytes_stored": "counted stored, B",
    "counted_launches": "counted launches",
    "modelled_launches": "modelled launches",
    "modelled_flops": "modelled flops",
    "modelled_bytes_loaded": "modelled loaded, B",
    "modelled_bytes_stored": "modelled stored, B",
    "variant": "constants",
}


def pick_runs() -> data.Loaded:
    """The sidebar's run picker; its choice is in the address, so a link opens the same runs."""
    folders = data.available()
    own = {folder.name for folder in folders if folder.origin == data.MINE}
    names = {_label(folder, own): folder for folder in folders}
    start = [name for name, folder in names.items() if folder in data.preferred(folders)]
    with st.sidebar:
        chosen = st.multiselect(
            "Runs",
            list(names),
            default=start,
            key="run",
            bind="query-params",
            placeholder="Choose runs",
            help="Recorded runs ship with the project; your own come from the folder below.",
        )
        st.caption(
            f"Own runs: `{data.short(data.runs_root())}` (set `{data.RUNS_VARIABLE}` for another folder)."
        )
        if st.button("Look for new runs", icon=":material/refresh:", type="tertiary"):
            data.forget()
            st.rerun()
    loaded = data.load([names[name] for name in chosen])
    if loaded.quarantined or loaded.torn_lines:
        wrong = f"{some(len(loaded.quarantined), 'unreadable file')}, {some(loaded.torn_lines, 'torn line')}"
        st.sidebar.warning(f"{wrong}: see Data health.", icon=":material/report:")
    return loaded


def some(number: int, thing: str) -> str:
    """ "1 file", "2 files"."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _label(folder: data.Folder, own: set[str]) -> str:
    """A run's name, short enough for the sidebar; a recorded one says so where an own run has its name."""
    shipped = folder.origin != data.MINE and folder.name in own
    return f"recorded/{folder.name}" if shipped else folder.name


def unfinished(loaded: data.Loaded) -> None:
    """Names the chosen runs that lack some of the cases they were planned with."""
    for path, planned, done in loaded.unfinished:
        st.caption(f"`{path}` holds {done} of the {planned} cases it was planned with.")


def heading(title: str, question: str) -> None:
    """A page's title and the question it answers."""
    st.title(title)
    st.markdown(f":gray[{question}]")


def nothing(loaded: data.Loaded, what: str) -> bool:
    """Says why a page is empty, and returns True, when no row is loaded at all."""
    if len(loaded.frame):
        return False
    if loaded.quarantined:
        st.info(
            f"None of the chosen files could be read, so there are no {what} to show. Data health says why."
        )
    else:
        st.info(
            f"There are no {what} to show: choose a run in the sidebar, or make one with the command below."
        )
    st.code("python -m experiments run quick", language="bash")
    return True


def choose(label: str, options: list[str], key: str, preferred: str | None = None) -> str:
    """A select box bound to the address; with a single option there is nothing to choose."""
    if len(options) < 2:
        return options[0] if options else ""
    index = options.index(preferred) if preferred in options else 0
    return st.selectbox(label, options, index=index, key=key, bind="query-params")


def choices():
    """A row for select boxes, as wide as those that there are."""
    return st.container(horizontal=True, gap="medium", vertical_alignment="bottom")


def show(chart, frame: pd.DataFrame, key: str, missing: str) -> None:
    """A chart, then the rows behind it: a table, a CSV and the command that makes them again.

    Parameters
    ----------
    chart : alt.Chart or None
    frame : prepared rows, failures included
    key : str
        Unique on the page; also the name of the downloaded file.
    missing : str
        The sentence to show when there is no chart.
    """
    draw(chart, key, missing)
    if frame.empty:
        return
    notes = _notes(frame)
    if notes:
        st.caption(notes)
    behind(table(frame), key, commands(frame))


def draw(chart, key: str, missing: str) -> None:
    """A chart with its description for screen readers, or the sentence that says why there is none."""
    if chart is None:
        st.info(missing)
        return
    words, drawn = chart.description, chart.copy(deep=False)
    drawn.description = alt.Undefined  # Streamlit takes the description as an argument, once
    st.altair_chart(drawn, key=f"chart-{key}", alt=words)


def behind(view: pd.DataFrame, key: str, made_by: list[str]) -> None:
    """What stands behind a chart: a table, a CSV and the commands that make it again."""
    with st.expander(
        f"Table ({some(len(view), 'row')}), CSV, and the command that makes it again",
        icon=":material/table:",
    ):
        alt = f"The {len(view)} rows behind the chart."
        st.dataframe(view, hide_index=True, key=f"table-{key}", placeholder="–", alt=alt)
        left, right = st.columns([1, 3], vertical_alignment="top")
        left.download_button(
            "Download CSV",
            view.to_csv(index=False).encode(),
            f"{key}.csv",
            "text/csv",
            key=f"csv-{key}",
            icon=":material/download:",
            on_click="ignore",
        )
        right.code("\n".join(made_by), language="bash")


def _notes(frame: pd.DataFrame) -> str:
    stale, lost = int(frame["stale"].sum()), len(rows.failed(frame))
    parts = []
    if stale:
        parts.append(
            f"{stale} of {len(frame)} rows are stale and drawn faint: their kernel has changed since."
        )
    if lost:
        counts = rows.failed(frame)["status"].value_counts()
        said = ", ".join(f"{count} {status}" for status, count in counts.items())
        parts.append(f"Without a result: {said}. The table has the reasons.")
    return " ".join(parts)


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """The columns worth reading, in plain words, without those that are empty throughout."""
    view = frame[[name for name in TABLE_COLUMNS if name in frame]]
    view = view.assign(variant=[text if text not in ("", "{}") else "" for text in frame["constants"]])
    empty = [name for name in view if view[name].isna().all() or (view[name] == "").all()]
    return view.drop(columns=empty).rename(columns=LABELS)


def commands(frame: pd.DataFrame) -> list[str]:
    """The commands that made these rows, as their runs' manifests say, else the runner's for the suite."""
    made = [command for command in dict.fromkeys(frame["command"]) if command] if "command" in frame else []
    if made:
        return made
    suites = [suite for suite in dict.fromkeys(frame["suite"]) if suite]
    return [f"python -m experiments run {shlex.quote(suite)}" for suite in suites] or [
        "python -m experiments list"
    ]


def ceilings_of(loaded: data.Loaded, device: str) -> None:
    """Says what was measured of a device and by which rows, or which command measures it."""
    top = loaded.tops.get(device)
    if not top:
        st.caption(f"What {device} itself can do has not been measured; this command does, on that device:")
        st.code("python -m experiments run ceilings", language="bash")
        return
    probes = rows.ok(loaded.frame)
    probes = probes[(probes["device"] == device) & probes["kernel"].isin(["read", "mma"])]
    runs = [run for run in dict.fromkeys(probes["run_id"]) if run]
    where = f"run {', '.join(runs)}" if runs else "a run of `ceilings` that is not among the chosen ones"
    rates = [f"reads {top.read_gbps:,.0f} GB/s"] if top.read_gbps is not None else []
    rates += [f"mma.sync {rate:,.0f} TFLOP/s in {dtype}" for dtype, rate in sorted(top.tflops.items())]
    st.caption(f"Measured ceilings of {device}: {', '.join(rates)} ({where}).")


def counted(frame: pd.DataFrame) -> None:
    """Counted beside modelled bytes, a suite of the CPU machine at a time."""
    suites = [suite for suite in dict.fromkeys(frame["suite"]) if suite]
    suite = choose("Suite", suites, "counted_suite", "quick")
    frame = frame[frame["suite"] == suite] if suites else frame
    chart = charts_runs.counted_against_modelled(frame)
    show(chart, frame, "counted", "No case of the CPU machine has counters.")
