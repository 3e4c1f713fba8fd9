"""The page docs/features.md: what FSDP, DeepSpeed and Echelon call a thing, and its tests.

``python -m tests.features`` writes it from `features.toml`; `test_features.py` compares the two and
looks up every test, setting and key.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).parent / "features.toml"
PAGE = Path(__file__).resolve().parent.parent / "docs" / "features.md"
COLUMNS = {"fsdp": "FSDP", "zero": "DeepSpeed ZeRO", "echelon": "Echelon"}

HEAD = """\
# FSDP, ZeRO and Echelon

Written by `python -m tests.features`. The first two columns are keys of an Accelerate FSDP
configuration and of a DeepSpeed JSON, as `echelon import` reads them: the test beside a key shows
what becomes of it here ("not needed" and "refused" come with their reason when a file is imported).
The last column is Echelon's own, with the test that shows that it does what it says. "-": no key.
"""


class Cell(NamedTuple):
    """What a column calls a feature, and the test, as "folder/file.py::function" under tests/."""

    column: str
    words: str
    test: str


def rows() -> dict[str, dict[str, dict[str, Cell]]]:
    """Return title -> feature -> column -> cell; a column without a cell is not there."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return {
        title: {
            feature: {column: Cell(column, *cell) for column, cell in row.items()}
            for feature, row in features.items()
        }
        for title, features in table.items()
    }


def cells() -> list[Cell]:
    """Return every cell."""
    found = [row for features in rows().values() for row in features.values()]
    return [cell for row in found for cell in row.values()]


def page() -> str:
    """Return the text of docs/features.md."""
    parts = [HEAD]
    for title, features in rows().items():
        lines = [f"| | {' | '.join(COLUMNS.values())} |", "|---|---|---|---|"]
        for feature, row in features.items():
            shown = (_shown(row.get(column)) for column in COLUMNS)
            lines.append(f"| {feature} | {' | '.join(shown)} |")
        parts.append(f"## {title}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def write() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


def _shown(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    file, _, function = cell.test.partition("::")
    return f'{cell.words} ([test](../tests/{file} "{function}"))'


if __name__ == "__main__":
    write()
