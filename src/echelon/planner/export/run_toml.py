"""A Plan -> a run.toml that says no more than it must, and gives the same plan, hash and all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from echelon.config.kinds import toml_text
from echelon.planner.export.settings import RunSettings


def run_toml(run: RunSettings, comments: tuple[str, ...] = ()) -> str:
    """Return the text of a run file with these settings."""
    return "\n".join(_lines(run.settings, comments)) + "\n"


def _lines(settings: Mapping[str, object], comments: tuple[str, ...]) -> Iterator[str]:
    yield from (f"# {line}" for line in comments)
    tables: dict[str, list[str]] = {}
    for key, value in settings.items():
        table, _, name = key.rpartition(".")
        tables.setdefault(table, []).append(f"{name} = {toml_text(value)}")
    for number, (table, lines) in enumerate(tables.items()):
        yield from ([""] if number or comments else [])
        yield f"[{table}]"
        yield from lines
