"""A module that another names in a string, to import it, stands on the same floor or below.

`.importlinter` holds the floors for import statements; it cannot read a string.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "echelon"

RECORDS = ("core/choices/", "schedule/")
"""Folders of registered records, whose fields name their runners above (decision 028)."""

PEERS = {
    "proof/independent/reading.py",
    "proof/run.py",
    "proof/whole_run/own_data.py",
    "proof/whole_run/own_precision.py",
    "proof/whole_run/whole_run.py",
}
"""Files that name the training engine: the subject of a proof, which runs on ranks beside it."""


def floors() -> dict[str, int]:
    """Return each package -> the number of its floor, from the contract of imports."""
    contract = (ROOT / ".importlinter").read_text(encoding="utf-8")
    layers = re.search(r"layers =\n((?:    .*\n)+)", contract)
    assert layers is not None
    rows = [re.findall(r"[a-z]+", row) for row in layers[1].splitlines()]
    return {name: number for number, row in enumerate(reversed(rows)) for name in row}


def named_upward(file: str, text: str) -> Iterator[str]:
    """Yield each module of a higher floor, or of a peer, that a string of a file names."""
    numbers = floors()
    own = file.partition("/")[0]
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Constant(value=str(name)):
                named = re.fullmatch(r"echelon\.([a-z]+)(?:\.\w+)*\.?(?::\w+)?", name)
                other = named[1] if named is not None else own
                if other != own and numbers.get(other, -1) >= numbers[own]:
                    yield name


def test_no_string_names_a_module_of_a_higher_floor() -> None:
    found = dict[str, list[str]]()
    for path in sorted(SOURCE.rglob("*.py")):
        file = path.relative_to(SOURCE).as_posix()
        if "/" in file and not file.startswith(RECORDS):
            names = list(named_upward(file, path.read_text(encoding="utf-8")))
            found |= {file: names} if names else {}
    assert found.keys() == PEERS, found
    assert all(name.startswith("echelon.training.") for names in found.values() for name in names)


@pytest.mark.parametrize(
    ("file", "text", "names"),
    [
        (
            "core/optional.py",
            'f(import_module("echelon.page.notebook"))',
            ["echelon.page.notebook"],
        ),
        ("core/choices.py", 'RUNNER = "echelon.training.loop:run"', ["echelon.training.loop:run"]),
        ("proof/run.py", 'OURS = "echelon.training.subject"', ["echelon.training.subject"]),
        ("launch/local.py", 'WORK = f"echelon.parallel.{name}"', ["echelon.parallel."]),
        ("api/training.py", 'RANK = "echelon.training.loop:train_rank"', []),
        ("cost/seconds/kernels.py", 'files("echelon.cost.seconds")', []),
        ("core/choices/registry.py", 'ENTRY_POINTS = "echelon.plugins"', []),
    ],
)
def test_each_way_to_name_one_is_found(file: str, text: str, names: list[str]) -> None:
    assert list(named_upward(file, text)) == names
