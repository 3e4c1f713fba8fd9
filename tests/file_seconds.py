"""How long each file of tests takes: a parallel run begins with the long ones, and ends together.

`python -m tests.file_seconds results.xml` writes the table anew from what `pytest --junitxml
results.xml` wrote; with a second word, `slow_seconds`, that of the slow tests. Only the order of
files hangs on it, so that it may be roughly right.
"""

from __future__ import annotations

import sys
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

HERE = Path(__file__).parent
LEAST_S = 4.0
"""Files that take less come last, in any order."""


def recorded(name: str = "file_seconds") -> dict[str, float]:
    """Return the seconds of each file that takes long, as recorded in a table."""
    return tomllib.loads((HERE / f"{name}.toml").read_text(encoding="utf-8"))["seconds"]


def begin_with_the_longest(items: list[pytest.Item]) -> None:
    """Sort tests by the seconds of their files; those of a file stay together, in their order."""
    seconds = recorded()
    items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0.0))


def read_results(results: Path) -> dict[str, float]:
    """Return the seconds of each file in a JUnit report of pytest, the longest first."""
    spent: dict[str, float] = defaultdict(float)
    for case in ElementTree.parse(results).iter("testcase"):
        words = case.attrib["classname"].split(".")
        # A class of tests is a word more than the module.
        module = [word for word in words if not word[:1].isupper()]
        spent["/".join(module) + ".py"] += float(case.attrib["time"])
    return dict(sorted(spent.items(), key=lambda one: -one[1]))


def table(spent: dict[str, float]) -> str:
    """Return the table as text."""
    lines = [f'"{file}" = {took:.0f}' for file, took in spent.items() if took >= LEAST_S]
    return "\n".join(["# Written by `python -m tests.file_seconds`.", "", "[seconds]", *lines, ""])


def main(arguments: Sequence[str]) -> int:
    """Write the table."""
    results, *name = arguments
    file = HERE / f"{name[0] if name else 'file_seconds'}.toml"
    file.write_text(table(read_results(Path(results))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
