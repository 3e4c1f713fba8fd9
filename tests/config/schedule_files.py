"""Schedules in files, for tests: their rows, the file, and the settings that name it."""

from __future__ import annotations

from pathlib import Path

from echelon.schedule.build import build_schedule

DEEP = ["model.layers=8", 'model.name="deep"']


FROM_FILE = ["mesh.pp=2", "pipeline.schedule=file", "pipeline.file=FILE"]


def csv(path: Path, rows: list[str]) -> Path:
    path.write_text("".join(row.replace(" ", ",") + "\n" for row in rows))
    return path


def rows_of(name: str, stages: int, ranks: int, microbatches: int) -> list[str]:
    schedule = build_schedule(
        name, num_stages=stages, num_ranks=ranks, num_microbatches=microbatches
    )
    return [" ".join(map(str, row)) for row in schedule.actions]


def from_file(path: Path, *more: str) -> list[str]:
    return [*(text.replace("FILE", str(path)) for text in FROM_FILE), *more]
