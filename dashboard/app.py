"""Entry point: `streamlit run dashboard/app.py`. Shows results that exist; runs nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import streamlit as st

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # Streamlit puts this folder on the path, not its parent
    sys.path.insert(0, str(ROOT))

from dashboard import views  # noqa: E402

# Not in a folder named "pages": Streamlit runs those by itself, so a link to one would bypass this file.
SCREENS = Path(__file__).resolve().parent / "screens"


def main() -> None:
    st.set_page_config(page_title="cuattn", page_icon=":material/query_stats:", layout="wide")
    page = st.navigation(
        [
            screen("overview", "Overview", "dashboard", default=True),
            screen("ladder", "Ladder", "stairs"),
            screen("block_size", "Block size", "view_column"),
            screen("numerics", "Numerics", "percent"),
            screen("roofline", "Roofline", "roofing"),
            screen("memory", "Memory vs throughput", "memory"),
            screen("decode", "Paged decode", "auto_stories"),
            screen("kernel", "Kernel", "developer_board"),
            screen("claims", "Claims", "fact_check"),
            screen("health", "Data health", "health_and_safety"),
        ]
    )
    st.session_state["loaded"] = views.pick_runs()
    page.run()


def screen(name: str, title: str, icon: str, default: bool = False) -> st.Page:
    """One page; its file's name is its address."""
    return st.Page(
        SCREENS / f"{name}.py", title=title, icon=f":material/{icon}:", url_path=name, default=default
    )


main()
