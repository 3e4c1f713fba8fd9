"""The page compare/data-parallel.md: replicas on threads beside ranks, each cell with its source.

`python -m tests.docs.data_parallel.page` writes it from `table.toml` beside it and the figures that
`python -m bench.threads --json bench/results/threads.json` keeps.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PAGE = ROOT / "docs" / "compare" / "data-parallel.md"
FIGURES = ROOT / "bench" / "results" / "threads.json"
COLUMNS = {"dp": "DataParallel: replicas on threads", "ddp": "DistributedDataParallel: ranks"}
RUN = "run"
UNITS: Mapping[str, Callable[[float], str]] = {
    "mb": lambda value: f"{value / 1e6:.1f} MB",
    "s": lambda value: f"{value:.2f} s",
    "share": lambda value: f"{100 * value:.1f} %",
}
HEAD = """\
# DataParallel and DistributedDataParallel

Written by `python -m tests.docs.data_parallel.page`. Each cell comes from a test, a rule, a formula
or a run. N replicas or ranks, G the values of all parameters, s bytes of a value. How to use the
threads: [guide](../guides/replicas/threads.md).
"""
TAIL = """\
The measured rows are medians of {rounds} steps of each, in turn in one run of
`python -m bench.threads`: {replicas} replicas on threads beside {replicas} ranks, {microbatches}
microbatches a step, on two CPU cores that other programs used too. Seconds say little about other
machines, and nothing here says who is faster on yours. An interpreter makes threads wait the more,
the smaller their operators are.
"""


def rows() -> dict[str, dict[str, list[str]]]:
    """Return feature -> column -> [words, source]."""
    return tomllib.loads((HERE / "table.toml").read_text(encoding="utf-8"))


def figures() -> dict[str, Any]:
    """Return what the bench has kept."""
    return json.loads(FIGURES.read_text(encoding="utf-8"))


def words(text: str, kept: Mapping[str, Any]) -> str:
    """Return a cell with its figures: `{threads.step_s:s}` is that figure in that unit."""

    def figure(match: re.Match[str]) -> str:
        name, key, unit = match.groups()
        return UNITS[unit](kept[name][key])

    return re.sub(r"\{(\w+)\.(\w+):(\w+)\}", figure, text)


def source_link(source: str) -> str:
    """Return where a cell comes from, as a link."""
    kind, _, name = source.partition(":")
    if kind == RUN:
        return "[run](../../bench/threads.py)"
    if kind == "rule":
        return f"[rule](../reference/rules.md#{name})"
    if kind == "formula":
        file, _, function = name.rpartition(".")
        return f'[formula](../../src/echelon/{file.replace(".", "/")}.py "{function}")'
    file, _, function = name.partition("::")
    return f'[test](../../tests/{file} "{function}")'


def text() -> str:
    """Return the page."""
    kept = figures()
    lines = [f"| | {' | '.join(COLUMNS.values())} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for feature, row in rows().items():
        cells = (f"{words(row[c][0], kept)} ({source_link(row[c][1])})" for c in COLUMNS)
        lines.append(f"| {feature} | {' | '.join(cells)} |")
    return "\n".join((HEAD, *lines, "", TAIL.format(**kept)))


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
