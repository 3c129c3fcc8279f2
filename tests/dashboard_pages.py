"""Opening the dashboard's pages without a browser, for its tests."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from streamlit.testing.v1 import AppTest

from dashboard import data

try:
    from streamlit.components.v2 import manifest_scanner
except ImportError:  # an older Streamlit, which has none
    manifest_scanner = None

APP = Path(data.__file__).with_name("app.py")


def opener(tmp_path: Path, monkeypatch):
    """A function that runs one page on the given folders and returns the app.

    An exception on the page fails the test. No installed package is searched for components, which takes as long
    as a page, for each app again.
    """
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # a page takes its place for good
    if manifest_scanner:
        monkeypatch.setattr(manifest_scanner, "scan_component_manifests", list)
    monkeypatch.setattr(data, "current_hashes", dict)

    def run(page: str, runs: Path | None = None, shipped: Path | None = None, **query) -> AppTest:
        monkeypatch.setenv(data.RUNS_VARIABLE, str(runs or tmp_path / "none"))
        monkeypatch.setattr(data, "RECORDED", shipped or tmp_path / "none")
        data._load.clear()
        app = AppTest.from_file(str(APP), default_timeout=30)
        for name, value in query.items():
            app.query_params[name] = value
        if page != "overview":
            app.switch_page(f"screens/{page}.py")  # before the first run, as a link to a page does
        app.run()
        assert not app.exception, app.exception
        return app

    return run


def specs(app: AppTest) -> list[dict]:
    """The specification of every chart on the page."""
    return [json.loads(chart.proto.spec) for chart in app.get("vega_lite_chart")]


def words(app: AppTest) -> list[str]:
    """Their titles."""
    return [spec["title"]["text"] for spec in specs(app)]


def shown(chart, *fields: str) -> list[dict]:
    """The rows of a chart's data that have these fields."""
    tables = chart.to_dict(validate=False)["datasets"].values()  # pages validate what they draw
    return [row for table in tables for row in table if all(row.get(field) is not None for field in fields)]
