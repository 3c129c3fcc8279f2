"""Prints the longest files and functions, and runs of ten lines that stand twice. A measure, not a fence."""
from __future__ import annotations

import ast
import subprocess
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".py", ".cu", ".cuh", ".h", ".cc"}
RUN = 10  # lines that should not stand twice
HAPPY = {".cu": 250, ".cuh": 150, ".h": 280, ".cc": 280, ".py": 300}  # where a file begins to want a reason
FUNCTION = 50


def sources() -> list[Path]:
    """Files git knows or would take, of the kinds above."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in names if Path(name).suffix in SUFFIXES and (ROOT / name).is_file()]


def functions(path: Path) -> list[tuple[int, str]]:
    """(lines, place) of each Python function."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        (node.end_lineno - node.lineno + 1, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
        for node in ast.walk(tree) if isinstance(node, kinds)
    ]


def repeated(files: list[Path]) -> list[tuple[str, str]]:
    """Pairs of places whose next ten lines are equal; blank lines and margins do not count."""
    seen, pairs, last = {}, [], defaultdict(int)
    for path in files:
        lines = [(i, line.strip()) for i, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)]
        lines = [(i, line) for i, line in lines if line]
        for at in range(len(lines) - RUN + 1):
            key = tuple(line for _, line in lines[at : at + RUN])
            place = path.relative_to(ROOT), lines[at][0]
            first = seen.setdefault(key, place)
            # A longer repeat is one pair, not one a line.
            if first != place and at > last[path]:
                pairs.append((f"{place[0]}:{place[1]}", f"{first[0]}:{first[1]}"))
                last[path] = at + RUN
    return pairs


def main() -> None:
    files = sources()
    lengths = sorted(((len(p.read_text(encoding="utf-8").splitlines()), p) for p in files), reverse=True)
    print("Longest files (* beyond its kind's measure)")
    for count, path in lengths[:25]:
        print(f"{count:6d}{'*' if count > HAPPY[path.suffix] else ' '} {path.relative_to(ROOT)}")
    print("\nLongest Python functions")
    longest = sorted((f for path in files if path.suffix == ".py" for f in functions(path)), reverse=True)
    for count, place in longest[:15]:
        print(f"{count:6d}{'*' if count > FUNCTION else ' '} {place}")
    print(f"\nRuns of {RUN} lines that stand twice")
    for place, first in repeated(files):
        print(f"  {place} = {first}")


if __name__ == "__main__":
    main()
