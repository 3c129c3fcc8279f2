"""Ladder: chunked attention and paged decode repaired step by step; what each step buys and costs."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from dashboard import charts_ladder, charts_reach, data, quotes, reach, rows, steps, views

QUOTED_SHARES = {"bandwidth use, %": "bytes_share", "multiprocessors busy, %": "sm_busy"}
SUITES = {"ladder": "Chunked attention", steps.PAGED: "Paged decode"}


def page(loaded: data.Loaded) -> None:
    views.heading("Ladder", "What does each repair of a slow kernel buy in time, and what does it cost?")
    if views.nothing(loaded, "results"):
        return
    made = steps.of(loaded.frame, loaded.rungs)
    if made.empty:
        st.info("These runs hold no ladder: no two rows are steps of one suite at one shape.")
        st.code("\n".join(f"python -m experiments run {suite}" for suite in SUITES), language="bash")
        return
    run, point = choose(made)
    made = run[run["point"] == point].sort_values("place", kind="stable")
    if len(rows.gpu(made)):
        climb(made)
        quoted_factor(run)
    else:
        st.info(
            "These rows come from the CPU machine, which executes every step and counts its bytes and "
            "launches. It models no time, so there is none to show.",
            icon=":material/calculate:",
        )
    st.header("Bytes, launches, memory")
    missing = "No step has bytes, launches or a peak, counted, modelled or measured."
    views.show(charts_ladder.costs(made), made, "ladder-costs", missing)
    if len(rows.gpu(made)):
        use(made, loaded)
    what_changes(made)


def choose(made: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The rows of one suite, device and run, and one of its points."""
    with views.choices():
        suites = [suite for suite in (*SUITES, *dict.fromkeys(made["suite"])) if suite in set(made["suite"])]
        names = {SUITES.get(suite, suite): suite for suite in suites}
        made = made[made["suite"] == names[views.choose("Ladder", list(names), "ladder_suite")]]
        timed = list(rows.gpu(made)["device"].value_counts().index)
        devices = list(made["device"].value_counts().index)
        device = views.choose("Device", devices, "ladder_device", timed[0] if timed else None)
        made = made[made["device"] == device]
        runs = {data.short_name(path): path for path in _runs(made)}
        made = made[made["run_path"] == runs[views.choose("Run", list(runs), "ladder_run")]]
        return made, views.choose("Shape, dtype and mode", steps.points(made), "ladder_point")


def _runs(made: pd.DataFrame) -> list[str]:
    """The paths of runs, those that had the whole device first, of them the newest."""
    made = made.assign(limited=made["memory_limit_bytes"].notna())
    made = made.sort_values(["limited", "finished_at"], ascending=[True, False], na_position="last")
    return list(dict.fromkeys(made["run_path"]))


def climb(made: pd.DataFrame) -> None:
    """Time step by step, against what the reader chooses."""
    st.header("Time")
    base = steps.BASE.get(made["suite"].iloc[0])
    scales = [f"× step {base}", "Time"] if base else ["× standard", "× flash", "Time"]
    scale = st.segmented_control(
        "Show", scales, default=scales[0], required=True, key=f"ladder_scale_{base or 'x'}",
        bind="query-params",
    )
    scale = scale if scale in scales else scales[0]
    missing = f"Here no step has a time to show as “{scale}”: none ended ok, or its yardstick did not."
    claims = list(data.claims().claims.values())
    yard = charts_ladder.SCALES[scale][2]
    said = quotes.times(made, claims, yard) if yard else None
    chart = charts_ladder.staircase(made, scale, said, quotes.gains(made, claims))
    views.show(chart, made, "ladder", missing)
    if said is not None and len(said):
        with st.expander(f"Quoted ({views.some(len(said), 'number')})", icon=":material/format_quote:"):
            view = said.rename(columns={"value": f"quoted, {scale}", "says": "what an article says"})
            st.dataframe(view, hide_index=True, key="ladder-quoted", alt="What articles say of the steps.")


def quoted_factor(run: pd.DataFrame) -> None:
    """The largest slowdown that is quoted of a step, beside that step at every shape of the run."""
    quote = reach.furthest(quotes.times(run, list(data.claims().claims.values()), "x_standard"))
    at = reach.everywhere(run, quote.step) if quote else run[:0]
    if at.empty:
        return
    st.header(f"Where {quote.value:.3g} times could come from")
    st.markdown("\n".join(f"* {sentence}" for sentence in reach.found(at, quote)))
    views.show(charts_reach.slowdowns(at, quote), at, "ladder-reach", "")


def use(made: pd.DataFrame, loaded: data.Loaded) -> None:
    """Shares of ceilings and of time."""
    st.header("What binds each step")
    claims = list(data.claims().claims.values())
    said = {panel: quotes.shares(made, claims, metric) for panel, metric in QUOTED_SHARES.items()}
    missing = "No step ended ok, so there is no use of the device."
    chart = charts_ladder.uses(made, said) if len(rows.ok(made)) else None
    views.show(chart, made, "ladder-use", missing)
    views.ceilings_of(loaded, made["device"].iloc[0])
    st.caption(
        "Tensor use: useful flop/s over the measured mma.sync rate. Bandwidth use: requested bytes over the "
        "time, over the measured read rate, which is the share of the time that these bytes alone explain; "
        "above 100 %, L2 served some. Busy: share of the time in which a multiprocessor has a warp. Launches: "
        "their number times an empty kernel's time, over the time; above 100 %, launches overlap."
    )


def what_changes(made: pd.DataFrame) -> None:
    """Each step's kernel and constants, and what it changes against which."""
    with st.expander(f"The steps ({made['step'].nunique()})", icon=":material/stairs:"):
        view = made.drop_duplicates("step")[["step", "kernel", "constants", "change", "after"]]
        view = view.rename(columns={"change": "what it changes", "after": "against step"})
        st.dataframe(view, hide_index=True, key="ladder-steps", alt="Each step's kernel and constants.")


page(st.session_state["loaded"])
