# SPDX-License-Identifier: Apache-2.0
"""Read a schedule that somebody wrote, from CSV or JSON, and write one as CSV.

    # a comment: two ranks, two microbatches, 1F1B
    rank 0, F0.0, F0.1,       , BW0.0,      , BW0.1
    rank 1,     , F1.0, BW1.0 , F1.1 , BW1.1,

A row is a rank, a cell a slot: one action, several with blanks between them, or nothing. The slots
are for the eye; what counts is the order within a row. Which rank owns a stage follows from the
rows. Reading checks the words only: `check_schedule` proves the rest, and names the cells of the
file where it is given the `ActionCells` that are read beside the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from echelon.core.errors import ConfigError, InfeasiblePlan, Problem
from echelon.core.rulebook.config import NO_SUCH_FILE
from echelon.core.rulebook.pipeline import (
    SCHEDULE_COVERS_ONCE,
    SCHEDULE_FILE_READABLE,
    SCHEDULE_PLACES_STAGES,
    SCHEDULE_ROWS_ARE_RANKS,
)
from echelon.core.rules import did_you_mean
from echelon.schedule.action import Action, Schedule
from echelon.schedule.rows import (
    ActionCells,
    FileRow,
    csv_rows,
    json_rows,
    parse_words,
    schedule_from_actions,
)
from echelon.schedule.simulate import Durations, simulate

_MOST_SLOTS = 2**21  # cells of a file


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFile:
    """A schedule, and where in its file each action stands."""

    schedule: Schedule
    cells: ActionCells


def read_schedule_file(path: Path) -> ScheduleFile:
    """Return the schedule in a CSV or JSON file with the cell of each action; see above."""
    text = _text_of(path)
    if path.suffix.lower() == ".json" or text.lstrip()[:1] in ("[", "{"):
        try:
            rows, whole = json_rows(text, str(path))
        except (ValueError, RecursionError) as error:
            raise ConfigError(_unreadable(path, str(error))) from error
    else:
        rows, whole = csv_rows(text), None
    if not rows:
        raise ConfigError(_unreadable(path, "there is no row in it"))
    actions = parse_words(rows, str(path))
    if whole is None:
        rows, actions = _by_rank(rows, actions, path)
        _require_sensible_numbers(rows, actions, path)
        schedule = schedule_from_actions(path.stem, actions)
    else:
        _require_a_row_per_rank(whole, path)
        schedule = whole
    cells = ActionCells(
        source=str(path),
        rows=tuple(row.name for row in rows),
        cells=tuple(tuple(cell for _, cell in row.words) for row in rows),
    )
    return ScheduleFile(schedule=schedule, cells=cells)


def schedule_csv(schedule: Schedule) -> str:
    """A checked schedule as CSV, which `read_schedule_file` reads back; every action is a slot.

    Empty slots are left out where there would be millions of them.
    """
    return "".join(f"{line}\n" for line in _csv_lines(schedule))


def _csv_lines(schedule: Schedule) -> Iterator[str]:
    numbers = f"{schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches"
    name = "".join(char if char.isprintable() else " " for char in schedule.name)
    yield f"# {name}: {numbers}"
    ones = (1.0,) * schedule.num_stages
    equal = replace(Durations.uniform(schedule.num_stages, backward_s=2), backward_s=ones)
    simulation = simulate(schedule, equal)
    slots = round(simulation.makespan_s)
    if slots * schedule.num_ranks > _MOST_SLOTS:
        for rank, row in enumerate(schedule.actions):
            yield ",".join([f"rank {rank}", *map(str, row)])
        return
    table = [[""] * slots for _ in range(schedule.num_ranks)]
    for event in simulation.events:
        if event.kind != "send":
            table[event.rank][round(event.start)] = event.name
    widths = [max(len(row[slot]) for row in table) for slot in range(len(table[0]))]
    for rank, row in enumerate(table):
        cells = (word.ljust(width) for word, width in zip(row, widths, strict=True))
        yield ",".join([f"rank {rank}", *cells]).rstrip()


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        reason = f"it is not UTF-8 (byte {error.start})"
        raise ConfigError(_unreadable(path, reason)) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        problem = NO_SUCH_FILE.problem(
            f"{path} cannot be read ({reason})", key="FILE", suggestions=_beside(path)
        )
        raise ConfigError(problem) from error


def _beside(path: Path) -> list[str]:
    """Return the schedule files next to a path that cannot be read, those of like name first."""
    try:
        found = [f for f in path.parent.iterdir() if f.suffix in (".csv", ".json") and f.is_file()]
    except (OSError, ValueError):
        return []
    near = did_you_mean(path.name, [file.name for file in found])
    rest = sorted(file.name for file in found if file.name not in near)
    return [str(path.parent / name) for name in (*near, *rest)][:8]


def _unreadable(path: Path, reason: str) -> Problem:
    return SCHEDULE_FILE_READABLE.problem(
        f"{path} is not a schedule: {reason}", key="FILE", set_by=str(path)
    )


def _by_rank(
    rows: list[FileRow], actions: list[list[Action]], path: Path
) -> tuple[list[FileRow], list[list[Action]]]:
    """Return the rows in the order of the ranks that they name, if they do."""
    named = [row.rank for row in rows if row.rank is not None]
    if not named:
        return rows, actions
    if len(named) == len(rows) and sorted(named) == list(range(len(rows))):
        order = sorted(range(len(rows)), key=named.__getitem__)
        return [rows[i] for i in order], [actions[i] for i in order]
    problems: list[Problem] = []
    seen: dict[int, str] = {}
    for row in rows:
        if row.rank is None:
            text = f"{row.name} does not say which rank it is, but others do"
        elif row.rank in seen:
            text = f"{row.name} is rank {row.rank}, and so is {seen[row.rank]}"
        elif row.rank >= len(rows):
            text = f"{row.name} is rank {row.rank}, but {len(rows)} rows are ranks 0 to "
            text += f"{len(rows) - 1}"
        else:
            seen[row.rank] = row.name
            continue
        free = sorted(set(range(len(rows))) - set(named))
        problems.append(
            SCHEDULE_ROWS_ARE_RANKS.problem(
                text,
                set_by=f"{path}, {row.name}",
                suggestions=[f"rank {rank}" for rank in free[:4]],
            )
        )
    raise ConfigError(problems[:8])


def _require_a_row_per_rank(whole: Schedule, path: Path) -> None:
    """Refuse a number of ranks that is not that of the rows, before anything is made per rank."""
    if whole.num_ranks != len(whole.actions):
        problem = SCHEDULE_PLACES_STAGES.problem(
            f"{len(whole.actions)} lists of actions for {whole.num_ranks} ranks",
            key="num_ranks",
            set_by=str(path),
            suggestions=[f'"num_ranks": {len(whole.actions)}'],
        )
        raise InfeasiblePlan([problem])


def _require_sensible_numbers(rows: list[FileRow], actions: list[list[Action]], path: Path) -> None:
    """Refuse a stage so high that the others cannot all be there, before anything counts to it."""
    total = sum(map(len, actions))
    far = [
        SCHEDULE_COVERS_ONCE.problem(
            f"rank {rank}, {cell}: {word} is of a stage above {total - 1}, but {total} actions "
            "cannot cover so many stages",
            set_by=f"{path}, {cell}",
        )
        for rank, (row, own) in enumerate(zip(rows, actions, strict=True))
        for (word, cell), action in zip(row.words, own, strict=True)
        if action.stage >= total
    ]
    if far:
        raise InfeasiblePlan(far[:8])
