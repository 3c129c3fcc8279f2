"""All disk access of the dashboard: which runs exist, and their rows; cached by path, time of change, size.

Reading goes through `experiments.store`, which sets aside whatever it cannot read. It imports no kernel and
no CuPy.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import streamlit as st

from dashboard import against, rows
from dashboard.asking import ROOT, causes, current_hashes, figures
from experiments import ceilings, ladder, store
from experiments.ceilings import Ceilings
from experiments.claims import definition, judging
from experiments.claims.findings import Finding
from experiments.explain import saved
from experiments.suite import Rung

RECORDED = store.RECORDED
RUNS_VARIABLE = "CUATTN_RUNS"
MINE, SHIPPED = "my runs", "recorded"


@dataclass(frozen=True)
class Folder:
    """One run on the disk: where it lies, its name, and whether it shipped with the project."""

    path: Path
    name: str
    origin: str


@dataclass
class Loaded:
    """Rows ready for the pages, and what was wrong with the files.

    Attributes
    ----------
    frame : pandas.DataFrame
        The latest attempt of every case, prepared (see `rows.prepare`), with what `ladder.FACTS` names.
    attempts : pandas.DataFrame
        Every attempt, prepared.
    quarantined : list of (str, str)
        File and reason.
    torn_lines : int
    files : pandas.DataFrame
        One row a file: run, file, size, schema version, modification time (UTC).
    unfinished : list of (str, int, int)
        Runs that lack rows: folder, cases planned, cases with a row.
    rungs : dict of str to list of Rung
        By run folder, those its manifest names.
    tops : dict of str to Ceilings
        By GPU: what the loaded rows measured of it, else a run beside them or a recorded one.
    """

    frame: pd.DataFrame
    attempts: pd.DataFrame
    quarantined: list[tuple[str, str]] = field(default_factory=list)
    torn_lines: int = 0
    files: pd.DataFrame = field(default_factory=pd.DataFrame)
    unfinished: list[tuple[str, int, int]] = field(default_factory=list)
    rungs: dict[str, list[Rung]] = field(default_factory=dict)
    tops: dict[str, Ceilings] = field(default_factory=dict)


def runs_root() -> Path:
    """The folder of the reader's own runs: `CUATTN_RUNS`, or ./runs."""
    return Path(os.environ.get(RUNS_VARIABLE) or "runs").expanduser().resolve()


def find(root: Path, origin: str) -> list[Folder]:
    """Every run below `root`, own ones newest first; a folder that cannot be listed holds none."""
    try:
        found = store.find_runs(root) if root.is_dir() else []
    except OSError:
        return []
    named = [Folder(path, _name(path, root), origin) for path in found]
    if origin == MINE:
        return sorted(named, key=_changed, reverse=True)
    return sorted(named, key=lambda folder: folder.name)


def _changed(folder: Folder) -> tuple[float, str]:
    try:
        return folder.path.stat().st_mtime, folder.name
    except OSError:
        return 0.0, folder.name


def _name(path: Path, root: Path) -> str:
    relative = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()
    return root.name if relative == "." else relative


def available() -> list[Folder]:
    """The reader's own runs, then the recorded ones."""
    return find(runs_root(), MINE) + find(RECORDED, SHIPPED)


def preferred(folders: list[Folder]) -> list[Folder]:
    """What the dashboard opens on: the newest own run of every suite and device, else the recorded runs.

    A run that is one of n shards brings the newest of the other n - 1 along. A run whose manifest cannot be
    read stands for itself, so that it is seen.
    """
    newest: dict[tuple, dict[tuple, Folder]] = {}
    for folder in folders:  # own runs come newest first
        if folder.origin == MINE:
            kind, shard = _kind(folder)
            group = newest.setdefault(kind, {shard: folder})
            if shard[1] in {of for _, of in group}:
                group.setdefault(shard, folder)
    return [folder for group in newest.values() for folder in group.values()] or folders


def _kind(folder: Folder) -> tuple[tuple, tuple]:
    """(suite and device, which shard of how many)."""
    whole = ("1", "1")
    try:
        manifest = store.read_manifest(folder.path)
    except store.StoreError:
        return (folder.path,), whole
    suite, device, shard = (manifest.get(key) for key in ("suite", "device", "shard"))
    if isinstance(device, dict):  # shards run on several of one kind
        device = {name: value for name, value in device.items() if name != "device_uuid"}
    if isinstance(shard, dict):
        whole = str(shard.get("index")), str(shard.get("of"))
    return ((str(suite), str(device)) if suite else (folder.path,)), whole


def load(folders: list[Folder]) -> Loaded:
    """Rows of these runs. A folder is read again only when one of its files has changed."""
    return _load(
        tuple(sorted(str(folder.path) for folder in folders)),
        _state(folders),
        tuple(sorted(current_hashes().items())),
    )


def forget() -> None:
    """Reads every run again next time, and what lies beside it: ceilings may have been measured since."""
    _load.clear()


def _state(folders: list[Folder]) -> tuple[tuple[str, int, int], ...]:
    state = []
    for folder in folders:
        for path in _files(folder.path):
            try:
                info = path.stat()
            except OSError:
                continue
            state.append((str(path), info.st_mtime_ns, info.st_size))
    return tuple(sorted(state))


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    names = [*path.glob("*.parquet"), *path.glob("journal-*.jsonl"), *path.glob("manifest.json")]
    return sorted(name for name in names if not name.name.startswith("."))


@st.cache_data(max_entries=8, show_spinner="Reading runs …")
def _load(paths: tuple[str, ...], state: tuple[tuple[str, int, int], ...], hashes: tuple) -> Loaded:
    found = store.read_runs([Path(path) for path in paths], attempts="all")
    frame = found.frame
    frame["stale"] = store.stale(frame, dict(hashes))
    said = {str(run.path): str(run.manifest.get("command", "")) for run in found.runs}
    frame["command"] = [said.get(path, "") for path in frame["run_path"]]
    held = {str(run.path): _device_bytes(run.manifest) for run in found.runs}
    frame["device_bytes"] = [held.get(path) for path in frame["run_path"]]
    attempts = rows.prepare(frame)
    quarantined = [
        (short(Path(path)), reason.removeprefix(f"{path}: ")) for path, reason in found.quarantined
    ]
    unfinished = [
        (short(run.path), planned, done)
        for run in found.runs
        if (done := _distinct(frame, run)) < (planned := _planned(run.manifest))
    ]
    tops = _tops(frame)
    together = {str(run.path): _together(run) for run in found.runs}
    latest = against.others(rows.latest(attempts), frame, together, tops)
    rungs = {str(run.path): ladder.rungs_of(run.manifest) for run in found.runs}
    return Loaded(
        latest, attempts, quarantined, found.torn_lines, _describe(state), unfinished, rungs, tops
    )


def _tops(frame: pd.DataFrame) -> dict[str, Ceilings]:
    """The ceilings of every GPU among the rows."""
    found: dict[str, Ceilings] = {}
    places = frame.loc[frame["machine"] == "gpu", ["device", "run_path"]].dropna().drop_duplicates()
    for device, path in places.itertuples(index=False):
        if not found.get(device):
            found[device] = ceilings.of_rows(frame, device) or ceilings.measured(device, Path(path))
    return found


def _together(run: store.RunInfo) -> str:
    """What the shards of one run share; a whole run is alone."""
    shard = run.manifest.get("shard")
    return f"{run.manifest.get('suite')}/{shard.get('of')}" if isinstance(shard, dict) else str(run.path)


def _planned(manifest: dict) -> int:
    cases = manifest.get("cases")
    return len(cases) if isinstance(cases, list) else 0


def _distinct(frame: pd.DataFrame, run: store.RunInfo) -> int:
    """How many cases of a run have a row."""
    return int(frame.loc[frame["run_path"] == str(run.path), "case_id"].nunique())


def _device_bytes(manifest: dict) -> float | None:
    """Memory of the first GPU of the machine a run was made on; a manifest may say nothing, or nonsense."""
    try:
        return float(manifest["environment"]["gpus"][0]["memory_bytes"])
    except (KeyError, IndexError, TypeError, ValueError):
        return None


def short(path: Path) -> str:
    """A path as one would type it in the project's folder."""
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)


def short_name(path: str) -> str:
    """A run's folder as the reader knows it: below the recorded runs, below their own, or as it is."""
    for root in (RECORDED, runs_root()):
        if Path(path).is_relative_to(root):
            return _name(Path(path), root)
    return short(Path(path))


def findings(loaded: Loaded) -> list[Finding]:
    """Every claim of the articles, judged by the runs that are loaded and by arithmetic."""
    paths = sorted({str(path) for path in loaded.frame["run_path"]}) if len(loaded.frame) else []
    folders = [Folder(Path(path), path, "") for path in paths]
    hashes, which = tuple(sorted(current_hashes().items())), (tuple(paths), _state(folders))
    return _findings(*which, hashes, figures(), causes(*which))


@st.cache_data(max_entries=8, show_spinner="Judging claims …")
def _findings(
    paths: tuple[str, ...], state: tuple, hashes: tuple, computed: str, inferred: str
) -> list[Finding]:
    frame = store.read_runs([Path(path) for path in paths]).frame
    known = {(claim, part): figure for claim, part, figure in json.loads(computed)}
    named = {(run, case): cause for run, case, cause in json.loads(inferred)}
    return judging.judge(claims(), frame, dict(hashes), known, named)


def claims() -> definition.Book:
    """The claims and the articles they come from."""
    return definition.load()


@dataclass(frozen=True)
class Explained:
    """One explanation of a kernel: its document, and whether the kernel has changed since (None: unknown)."""

    path: Path
    origin: str
    document: dict
    stale: bool | None


def explanations() -> tuple[list[Explained], list[tuple[str, str]]]:
    """The reader's explanations, newest first, then recorded ones; and (file, reason) of unreadable ones."""
    found: list[Explained] = []
    unreadable: list[tuple[str, str]] = []
    seen: set[Path] = set()
    for root, origin in ((runs_root(), MINE), (RECORDED, SHIPPED)):
        paths = [path for path in saved.find([root]) if path.resolve() not in seen]
        seen.update(path.resolve() for path in paths)
        states = [(path, *_stamp(path)) for path in paths]
        for path, changed, size in sorted(states, key=lambda state: -state[1]) if origin == MINE else states:
            document, reason = _read_explanation(str(path), changed, size)
            if document is None:
                unreadable.append((short(path), reason.removeprefix(f"{path}: ")))
            else:
                found.append(Explained(path, origin, document, _stale(document)))
    return found, unreadable


def _stamp(path: Path) -> tuple[int, int]:
    try:
        info = path.stat()
    except OSError:  # gone since it was found; reading says so
        return 0, 0
    return info.st_mtime_ns, info.st_size


@st.cache_data(max_entries=64, show_spinner=False)
def _read_explanation(path: str, changed: int, size: int) -> tuple[dict | None, str]:
    try:
        return saved.read(Path(path)), ""
    except store.StoreError as error:
        return None, str(error)


def _stale(document: dict) -> bool | None:
    hashes = current_hashes()
    if not hashes:
        return None
    one = pd.DataFrame([{name: document[name] for name in ("kernel", "source_hash")}])
    return bool(store.stale(one, hashes).iloc[0])


def _describe(state: tuple[tuple[str, int, int], ...]) -> pd.DataFrame:
    lines = [
        {
            "run": Path(path).parent.name,
            "file": short(Path(path)),
            "size": size,
            "schema version": schema_version(Path(path)),
            "changed (UTC)": pd.Timestamp(changed, unit="ns", tz="UTC"),
        }
        for path, changed, size in state
    ]
    return pd.DataFrame(lines, columns=["run", "file", "size", "schema version", "changed (UTC)"])


def schema_version(path: Path) -> str:
    """The schema version a file says it has; "unreadable" when it cannot be asked, "–" when it says none."""
    try:
        if path.suffix == ".parquet":
            stored = pq.read_schema(path).metadata or {}
            return stored.get(b"schema_version", "–".encode()).decode()
        if path.name == store.MANIFEST:
            return str(json.loads(path.read_text(encoding="utf-8")).get("schema_version", "–"))
    except (OSError, ValueError, AttributeError, pa.ArrowException):
        return "unreadable"
    return "–"
