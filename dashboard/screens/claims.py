"""Claims: what the articles claim, what the chosen runs and arithmetic say, and what would test the rest."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from dashboard import charts_claims, data, style, views
from experiments.claims.definition import Book
from experiments.claims.findings import NOT_TESTED, Finding, PartFinding, counts
from experiments.claims.words import accepted, quoted, shown

ALL = "all"


def page(loaded: data.Loaded) -> None:
    views.heading("Claims", "What do the articles claim, and what do rows and arithmetic make of it?")
    book, found = data.claims(), data.findings(loaded)
    state(loaded, found)
    told = counts(found)
    for cell, verdict in zip(st.columns(len(style.VERDICTS)), style.VERDICTS):
        cell.metric(f"{style.VERDICTS[verdict][1]} {verdict}", told[verdict], border=True)
    views.draw(charts_claims.glance(found), "claims-glance", "There are no claims.")
    st.caption(" · ".join(f"{letter}: {title}" for letter, (title, _) in book.articles.items()))
    verdict = st.segmented_control(
        "Show", [ALL, *style.VERDICTS], default=ALL, required=True, key="verdict", bind="query-params"
    )
    chosen = [one for one in found if verdict in (ALL, None, one.verdict)]
    numbers(chosen)
    everything(chosen)
    detail(book, found)


def state(loaded: data.Loaded, found: list[Finding]) -> None:
    """Which rows judge, and which do not."""
    if loaded.frame.empty:
        st.info("No rows are loaded, so only arithmetic answers: choose runs in the sidebar, or make some "
                "with the commands below.")
        return
    stale = len({row for one in found for row in one.stale})
    said = [f"Judged by {views.some(len(loaded.frame), 'row')} of the runs chosen in the sidebar."]
    if not data.current_hashes():
        said.append("Whether kernels have changed since is unknown: their sources cannot be read here.")
    elif stale:
        said.append(f"{views.some(stale, 'row')} that would count {'is' if stale == 1 else 'are'} *stale*: "
                    "the kernel has changed since. They judge nothing; running the suite again renews them.")
    st.caption(" ".join(said))


def numbers(chosen: list[Finding]) -> None:
    """Found over quoted, where both are numbers."""
    st.header("Beside the quoted numbers")
    table = charts_claims.compared(chosen)
    views.draw(charts_claims.against_quoted(table), "claims-quoted",
               "None of these claims has both a quoted number and one that was found.")
    if len(table):
        named = {"number": "claim", "says": "sentence", "known": "how known"}
        shown_columns = ["number", "says", "quoted", "found", "ratio", "verdict", "known", "device", "cases"]
        view = table[shown_columns].rename(columns={**named, "ratio": "found ÷ quoted"})
        views.behind(view, "claims-quoted", ["python -m experiments claims"])


def everything(chosen: list[Finding]) -> None:
    """One row a claim."""
    st.header("Every claim")
    if not chosen:
        st.info("No claim has this verdict with these runs.")
        return
    lines = [
        {
            "claim": one.claim.number,
            "verdict": f"{style.VERDICTS[one.verdict][1]} {one.verdict}",
            "what it says": one.claim.statement,
            "how known": ", ".join(one.how) if one.verdict != NOT_TESTED else "",
            "evidence, or what would test it": one.sentence if one.verdict != NOT_TESTED else one.advice,
            "parts": one.tally,
            "where": one.claim.place,
        }
        for one in chosen
    ]
    wide = st.column_config.TextColumn(width="large")
    st.dataframe(
        pd.DataFrame(lines), hide_index=True, key="claims-table", alt=f"{len(lines)} claims with verdicts.",
        column_config={"what it says": wide, "evidence, or what would test it": wide},
    )


def detail(book: Book, found: list[Finding]) -> None:
    """All that is known of one claim; its number is in the address."""
    st.header("One claim")
    by_number = {str(one.claim.number): one for one in found}
    number = st.selectbox("Claim", list(by_number), index=1, key="claim", bind="query-params")
    one = by_number[number]
    claim, (_, sign) = one.claim, style.VERDICTS[one.verdict]
    st.subheader(f"{sign} {claim.number}: {one.verdict}")
    st.markdown(f"**{plain(claim.statement)}**")
    titles = [f"*{letter}: {title}*" for letter, (title, _) in book.articles.items()
              if any(place.strip().startswith(letter) for place in claim.place.split(";"))]
    st.caption(f"{claim.place} ({'; '.join(titles)})")
    if one.verdict != NOT_TESTED:
        how = ", ".join([*one.how, *one.devices])
        st.markdown(f"{plain(one.sentence)} :gray[({how}{'; ' + one.tally if one.tally else ''})]")
    st.markdown(f":gray[The test:] {plain(claim.reason)}")
    for place, part in enumerate(one.parts):
        sentence(part, f"{number}-{place}")
    missing = claim.missing()
    if missing:
        st.caption(f"The suite {' or '.join(missing)} does not exist here yet.")
    st.caption("To test it, and to see it in the terminal:")
    st.code("\n".join([*claim.commands(), f"python -m experiments claims --claim {number}"]), language="bash")


def plain(text: str) -> str:
    """Text without what Markdown would take for its own."""
    return text.replace("~", "\\~").replace("$", "\\$").replace("*", "\\*")


def sentence(found: PartFinding, key: str) -> None:
    """One part: its verdict, its test, the rows behind it, and the rows set aside."""
    part, (_, sign) = found.part, style.VERDICTS[found.verdict]
    said = [f"quoted {quoted(part)}"] * bool(part.quoted) + [f"accepted {accepted(part)}"] * bool(part.kind)
    said += ["decides nothing"] * part.side
    with st.container(border=True):
        st.markdown(f"{sign} **{plain(part.says)}** · {found.verdict}")
        if said:
            st.caption(plain("; ".join(said)))
        if not found.cases:
            st.markdown(f":gray[{plain(found.sentence.removeprefix(part.says + ': ')).capitalize()}.]")
        else:
            st.markdown(plain(found.sentence))
            cases(found, key)
        for one in found.aside:
            st.caption(f"Set aside: {views.some(len(one.rows), 'row')}, {plain(one.why)}.")


def cases(found: PartFinding, key: str) -> None:
    """The cases of a part as a table, and the rows behind them."""
    lines, behind = [], []
    for case in found.cases:
        lines.append({
            "case": case.label,
            "value": shown(case.value, found.part.unit),
            "holds": "yes" if case.holds else "no",
            "how known": ", ".join(sorted(case.how)),
            "more": case.note,
        })
        behind += [
            {"case": case.label, "role": one.role, "kernel": one.kernel,
             "value": shown(one.value, found.value_unit), "how known": one.how, "run": one.run,
             "case id": one.case}
            for one in case.samples
        ]
    table = pd.DataFrame(lines)
    if not table["more"].any():
        table = table.drop(columns="more")
    st.dataframe(table, hide_index=True, key=f"cases-{key}", alt=f"The {len(lines)} cases of this sentence.")
    if behind:
        with st.expander(f"The {views.some(len(behind), 'row')} behind it", icon=":material/table:"):
            st.dataframe(pd.DataFrame(behind), hide_index=True, key=f"rows-{key}",
                         alt=f"The {len(behind)} rows behind this sentence.")


page(st.session_state["loaded"])
