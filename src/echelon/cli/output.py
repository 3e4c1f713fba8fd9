"""Where output goes: results to stdout, messages to stderr, one versioned object for `--json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence

from echelon.core.errors import EchelonError

JSON_SCHEMA = 1


def print_json(command: str, result: Mapping[str, object]) -> None:
    """Print the one object that `--json` promises: its schema, the command, and the result."""
    print(json.dumps({"schema": JSON_SCHEMA, "command": command, **result}, indent=2))


def print_error(error: EchelonError) -> None:
    """Print every problem of `error` on stderr, in color where that is a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for problem in error.problems:
        text = Text(problem.render())
        text.highlight_regex(r"\Aerror\[[^\]]*\]", "bold red")
        text.highlight_regex(r"\n  .*", "dim")
        console.print(text)


def print_error_json(command: str, error: EchelonError) -> None:
    """Print the problems of `error` as the one object on stdout that `--json` promises."""
    print_json(command, {"error": True, "problems": [p.to_json() for p in error.problems]})


def note(message: str) -> None:
    """Print a message that is not the result, on stderr."""
    print(message, file=sys.stderr, flush=True)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return rows in aligned columns: the first to the left, numbers to the right."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    right = [
        column > 0 and all(row[column][:1].isdigit() or row[column] == "-" for row in cells[1:])
        for column in range(len(header))
    ]
    lines = [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in cells
    ]
    return "\n".join(lines)
