"""The runner with a worker that touches no machine, and a process that forks one as often as a test likes.

`python -m tests.stub_runner` imports everything once. For each line on its stdin, a list of jobs in JSON, it
forks a process a job, all at once, and answers with their exit statuses. A job is `words`, the command line of
`python -m experiments` (or `journal FOLDER NUMBER ROWS`, which writes such a journal), `log`, where its
output goes, maybe `seen`, a file that says how many rows a reader saw, and maybe `kill_after`, seconds until SIGKILL, counted from the start or, with `rows`, from the
moment the run folder named in `folder` holds so many.
"""
from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from experiments import worker

ROOT = Path(__file__).resolve().parent.parent
CASE_S = 0.01
LOOK_S = 60.0  # the longest that a case waits for a reader
RUNS = 8  # that a reader looks on
SEEN = "CUATTN_TEST_SEEN"
DEVICE = {"machine": "cpu", "device": "stub", "arch": "cpu", "device_uuid": None}
SUITE = """
title = "Stub"
question = "Is every case there, exactly once?"
[cpu.small]
kernels = ["flash"]
h = 2
hkv = 1
d = 64
n = [1, 2, 3, 4, 5, 6, 7, 8]
"""


def serve(pipe, parent: int, *rest) -> None:
    """A worker's process: each case takes a moment and is right."""
    worker.isolate(parent)
    worker.tell(pipe, "ready", DEVICE)
    while (params := worker.receive(pipe)) is not None:
        worker.tell(pipe, "phase", "build")
        time.sleep(CASE_S)
        await_reader(params["n"])
        worker.tell(pipe, "row", {"status": "ok", "max_err": 0.5 / params["n"], "measured_samples_us": [0.1, 2.0]})


def await_reader(case: int) -> None:
    """Where a reader looks on, case 1, 2, … of each run waits until it saw all their cases before that."""
    due = time.monotonic() + LOOK_S
    while SEEN in os.environ and int(Path(os.environ[SEEN]).read_text() or 0) < RUNS * (case - 1):
        assert time.monotonic() < due
        time.sleep(0.002)


def write_journal(folder: str, number: str, rows: str) -> None:
    from experiments import store
    from tests.store_rows import row

    journal = store.Journal(Path(folder) / f"journal-{number}.jsonl")
    for i in range(int(rows)):
        journal.append(row(f"{number}-{i}", error="ü" * 500))
    journal.close()


def _job(words: list[str], log: str, seen: str | None = None, **end) -> None:
    """What the forked process does."""
    if seen:
        os.environ[SEEN] = seen
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if words[0] == "journal":
        write_journal(*words[1:])
        return
    from experiments import cli

    sys.argv = ["experiments", *words]
    cli.main()


def journalled(run: Path) -> int:
    """Lines of the run's journals."""
    return sum(path.read_bytes().count(b"\n") for path in run.glob("journal-*.jsonl"))


def _fork(job: dict) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 0
    try:
        _job(**job)
    except SystemExit as error:
        code = error.code or 0
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 99
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _await(pid: int, job: dict) -> int:
    """The exit status of a process, killed when its time comes; negative where a signal ended it."""
    left = job.get("kill_after")
    due = None if left is None or "rows" in job else time.monotonic() + left
    while due is None or time.monotonic() < due:
        done, status = os.waitpid(pid, 0 if left is None else os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if due is None and journalled(Path(job["folder"])) >= job["rows"]:
            due = time.monotonic() + left
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    from typer.testing import CliRunner

    from experiments import cli

    CliRunner().invoke(cli.app, ["plan", "quick", "--machine", "cpu"])  # imports what they will need
    worker.Worker.process = staticmethod(serve)
    print("ready", flush=True)
    for line in sys.stdin:
        jobs = json.loads(line)
        pids = [_fork(job) for job in jobs]
        print(json.dumps([_await(pid, job) for pid, job in zip(pids, jobs)]), flush=True)


class Forks:
    """The test's end of such a process; jobs' output goes to `log`, unless they name another one."""

    def __init__(self, log: Path):
        self.log = log
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.stub_runner"],
            cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        assert self._process.stdout.readline() == "ready\n"

    def begin(self, *jobs, **more) -> None:
        """Start a process for each list of words."""
        more = {"log": str(self.log), **more}
        listed = [{"words": [str(w) for w in words], **more} for words in jobs]
        self._process.stdin.write(json.dumps(listed) + "\n")
        self._process.stdin.flush()

    def ended(self) -> bool:
        """Whether all of them are done."""
        return bool(select.select([self._process.stdout], [], [], 0)[0])

    def statuses(self) -> list[int]:
        """Wait for their exit statuses."""
        return json.loads(self._process.stdout.readline())

    def run(self, *words, **more) -> int:
        """One process, to its end."""
        self.begin(words, **more)
        return self.statuses()[0]

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


if __name__ == "__main__":
    main()
