"""What only the kernels' sources know, asked of a child process: no kernel is imported here, and one that is
being edited cannot break a page.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import streamlit as st

ROOT = Path(__file__).resolve().parent.parent
HASHES = "import json, experiments.catalog as c; print(json.dumps(c.current_hashes()))"
CHUNKS = (
    "import json, experiments.catalog as c; print(json.dumps({name: entry.row.constants['chunk'] "
    "for name, entry in c.catalog().items() if entry.row and 'chunk' in entry.row.constants}))"
)


@st.cache_data(ttl=60, show_spinner=False)
def current_hashes() -> dict[str, str]:
    """Kernel name → hash of its source today; empty when the sources cannot be read."""
    return _asked(HASHES)


@st.cache_data(ttl=600, show_spinner=False)
def default_chunks() -> dict[str, float]:
    """Kernel → the chunk it takes where a case sets none; empty when the sources cannot be read."""
    return {name: float(size) for name, size in _asked(CHUNKS).items()}


@st.cache_data(ttl=600, show_spinner=False)
def figures() -> str:
    """The arithmetic behind claims, as JSON; "[]" where it cannot be done. A child imports the kernels."""
    try:
        return _child("-m", "experiments.claims.figures")
    except (OSError, subprocess.SubprocessError):
        return "[]"


@st.cache_data(ttl=600, max_entries=8, show_spinner=False)
def causes(paths: tuple[str, ...], state: tuple) -> str:
    """What `diagnose` names first for the rows of these runs in this state, as JSON; "[]" where it cannot."""
    try:
        return _child("-m", "experiments.claims.triage", *paths)
    except (OSError, subprocess.SubprocessError):
        return "[]"


def _asked(code: str) -> dict:
    """What a child process prints as JSON; {} where it cannot."""
    try:
        return dict(json.loads(_child("-c", code)))
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}


def _child(*words: str) -> str:
    """What a Python process in the project's folder prints."""
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout
