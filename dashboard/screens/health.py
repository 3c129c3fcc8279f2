"""Data health: what could not be read, what failed and why, what is out of date."""

from __future__ import annotations

import shlex
from pathlib import Path

import pandas as pd
import streamlit as st

from dashboard import charts_runs, data, rows, views
from experiments.schema import SCHEMA_VERSION


def page(loaded: data.Loaded) -> None:
    views.heading("Data health", "Can the numbers on the other pages be trusted?")
    lost = rows.failed(loaded.frame)
    cells = st.columns(5)
    # Without the kernels' sources, no row can be told to be stale, and 0 would say that none is.
    stale = f"{int(loaded.frame['stale'].sum()):,}" if data.current_hashes() else "unknown"
    for cell, (label, value) in zip(
        cells,
        (
            ("Files", len(loaded.files)),
            ("Unreadable files", len(loaded.quarantined)),
            ("Torn journal lines", loaded.torn_lines),
            ("Cases not ok", len(lost)),
            ("Stale rows", stale),
        ),
    ):
        cell.metric(label, value if isinstance(value, str) else f"{value:,}", border=True)
    if loaded.quarantined:
        st.header("Files set aside")
        st.table(pd.DataFrame(loaded.quarantined, columns=["file", "why"]).set_index("file"))
    if loaded.frame.empty:
        st.info("No rows are loaded: choose a run in the sidebar.")
    else:
        outcomes(loaded, lost)
    files(loaded)


def outcomes(loaded: data.Loaded, lost) -> None:
    st.header("Outcomes")
    views.show(charts_runs.statuses(loaded.frame), loaded.frame, "health-statuses", "No case has a status.")
    views.unfinished(loaded)
    failures(lost)
    if len(rows.cpu(loaded.frame)):
        st.header("Bytes, counted and modelled")
        views.counted(rows.cpu(loaded.frame))
    if loaded.frame["stale"].any():
        st.header("Stale rows")
        st.caption("The kernel's source has changed since; running the suite again renews these rows.")
        old = loaded.frame[loaded.frame["stale"]]
        st.dataframe(
            old[["kernel", "shape", "suite", "device", "source_hash", "finished_at", "run_id"]],
            hide_index=True,
            alt=f"{len(old)} rows whose kernel has changed since.",
        )
    st.header("Attempts")
    views.show(
        charts_runs.timeline(loaded.attempts), loaded.attempts, "attempts", "No attempt has a start time."
    )
    again = len(loaded.attempts) - len(loaded.frame)
    if again:
        st.caption(f"{again} earlier attempts were followed by a later one, which the other pages show.")


def failures(lost) -> None:
    """Every case that did not end ok, with its reason and the command that tries again."""
    st.header("Failures and their reasons")
    if lost.empty:
        st.success("Every case ended ok.", icon=":material/check_circle:")
    else:
        view = lost[
            [
                "status",
                "kernel",
                "shape",
                "error",
                "suite",
                "device",
                "attempt",
                "finished_at",
                "run_id",
                "case_id",
            ]
        ]
        st.dataframe(
            view.rename(columns={"error": "reason", "finished_at": "finished (UTC)"}),
            hide_index=True,
            alt=f"{len(view)} cases that did not end ok, with the reason of each.",
        )
        st.code(
            "\n".join(
                f"python -m experiments resume {shlex.quote(data.short(Path(run)))}"
                for run in dict.fromkeys(lost["run_path"])
            ),
            language="bash",
        )


def files(loaded: data.Loaded) -> None:
    st.header("Files and schema versions")
    if loaded.files.empty:
        st.info("No file is chosen.")
        return
    st.caption(f"This dashboard reads schema version {SCHEMA_VERSION} and lifts older ones to it.")
    st.dataframe(
        loaded.files,
        hide_index=True,
        alt="Every file read: its size and schema version.",
        column_config={"size": st.column_config.NumberColumn("size, B", format="localized")},
    )


page(st.session_state["loaded"])
