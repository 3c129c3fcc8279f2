"""A command as a user types it, run in this process."""
from __future__ import annotations

import sys

import pytest

from experiments import cli


def call(monkeypatch, capsys, *words) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `python -m experiments …`; never a traceback."""
    monkeypatch.setattr(sys, "argv", ["experiments", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return ended.value.code or 0, out, err
