"""Entry point: `streamlit run dashboard/app.py`. Shows results that exist; runs nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import streamlit as st

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # Streamlit puts this folder on the path, not its parent
    sys.path.insert(0, str(ROOT))

from dashboard import views  # noqa: E402

PAGES = Path(__file__).resolve().parent / "pages"


def main() -> None:
    st.set_page_config(page_title="cuattn", page_icon=":material/query_stats:", layout="wide")
    page = st.navigation(
        [
            st.Page(PAGES / "overview.py", title="Overview", icon=":material/dashboard:", default=True),
            st.Page(
                PAGES / "memory.py", title="Memory vs throughput", icon=":material/memory:", url_path="memory"
            ),
            st.Page(
                PAGES / "decode.py", title="Paged decode", icon=":material/auto_stories:", url_path="decode"
            ),
            st.Page(
                PAGES / "health.py",
                title="Data health",
                icon=":material/health_and_safety:",
                url_path="health",
            ),
        ]
    )
    st.session_state["loaded"] = views.pick_runs()
    page.run()


main()
