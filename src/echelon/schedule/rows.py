# SPDX-License-Identifier: Apache-2.0
"""Schedules written as rows of words: the cells of a file, and the rank that owns each stage.

`ActionCells` names the places of a schedule's actions: what an error calls them.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from echelon.core.errors import ConfigError, Problem
from echelon.core.rulebook.pipeline import SCHEDULE_ACTION_KNOWN
from echelon.core.serialize import decode_json
from echelon.schedule.action import Action, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionCells:
    """Name the cell of each action, as it stands in the file that the schedule was read from.

    `cells[r][i]` is where action `i` of rank `r` stands, such as ``row 3, column 5``; `rows[r]` is
    where the row of rank `r` does. Without a file an action is named by its place in the list.
    """

    source: str = ""
    rows: tuple[str, ...] = ()
    cells: tuple[tuple[str, ...], ...] = ()

    def at(self, rank: int, place: int) -> str:
        """Return the name of one action's cell: ``place 3``, or its row and column."""
        return self.cells[rank][place] if self.source else f"place {place}"

    def file_at(self, rank: int, place: int | None = None) -> str:
        """Return the file and the cell (or the row alone); nothing where there is no file."""
        if not self.source:
            return ""
        if place is None:
            return f"{self.source}, {self.rows[rank]}" if rank < len(self.rows) else self.source
        return f"{self.source}, {self.cells[rank][place]}"


NO_FILE = ActionCells()
"""Name actions by their places in the lists."""


_RANK = re.compile(r"\s*rank\s*(\d{1,9})\s*(?::|$|\s)", re.IGNORECASE | re.ASCII)
_NEARLY = re.compile(r"(BW|F|B|W)[^0-9]*([0-9]{1,9})[^0-9]+([0-9]{1,9})", re.ASCII)
_MOST_NAMED = 8  # cells in a message
_LONGEST_WORD = 24  # characters
_MOST_COUNTED = 10**9  # the largest number of a cell


FileWord = tuple[str, str]
"""One word of a file, and the name of the cell that it stands in."""


@dataclass(frozen=True, slots=True)
class FileRow:
    """One rank's row: its name in the file, the rank that it says it is, and its words."""

    name: str
    rank: int | None
    words: tuple[FileWord, ...]


def csv_rows(text: str) -> list[FileRow]:
    """Return the rows of a CSV text; rows and columns count from 1, comments and blank lines too.

    Cells are separated by commas, or by semicolons or tabs where there is no comma.
    """
    lines = [line.partition("#")[0] for line in re.split(r"\r\n|\r|\n", text)]
    mark = next((mark for mark in ",;\t" if any(mark in line for line in lines)), ",")
    rows: list[FileRow] = []
    for number, line in enumerate(lines, 1):
        if line.strip() or mark in line:
            cells = _csv_cells(line, mark)
            rows.append(_row(f"row {number}", cells, "column"))
    return rows


def json_rows(text: str, source: str) -> tuple[list[FileRow], Schedule | None]:
    """Return the rows of a JSON text, and the schedule where `Schedule.to_json` wrote it.

    ValueError says what is not as it should be. Rows and cells count from 1.
    """
    data: Any = decode_json(text)
    if isinstance(data, dict):
        entries = cast("dict[str, Any]", data)
        for key in ("num_ranks", "num_microbatches"):
            count = entries.get(key)
            if isinstance(count, int) and count > _MOST_COUNTED:
                raise ValueError(f"{key} is more than {_MOST_COUNTED}")
        rows = _json_rows(entries.get("actions", []))
        parse_words(rows, source)
        return rows, Schedule.from_json(text)
    return _json_rows(data), None


def parse_words(rows: list[FileRow], source: str) -> list[list[Action]]:
    """Return the action of each word; ConfigError names every cell whose word is not one."""
    problems: list[Problem] = []
    actions: list[list[Action]] = []
    for row in rows:
        actions.append([])
        for word, cell in row.words:
            try:
                if len(word) > _LONGEST_WORD:
                    raise ValueError("no stage or microbatch has so long a number")
                actions[-1].append(Action.parse(word))
            except ValueError:
                problems.append(_unknown(word, cell, source))
    if problems:
        more = len(problems) - _MOST_NAMED
        rest = [SCHEDULE_ACTION_KNOWN.problem(f"and {more} more of the same kind")]
        raise ConfigError(problems[:_MOST_NAMED] + (rest if more > 0 else []))
    return actions


def _csv_cells(line: str, mark: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=mark))
    except csv.Error:
        # Too long for the reader: quotes mean nothing in a schedule.
        return line.split(mark)


def _json_rows(data: Any) -> list[FileRow]:
    if not isinstance(data, list):
        raise ValueError("JSON is what Echelon writes, or a list with one row per rank")
    rows: list[FileRow] = []
    for number, row in enumerate(cast("list[Any]", data), 1):
        name = f"row {number}"
        if isinstance(row, str):
            rank = _RANK.match(row)
            words = row[rank.end() :].split() if rank else row.split()
            rows.append(_row(name, words, "word", None if rank is None else int(rank[1])))
        elif isinstance(row, list):
            cells = list(_json_cells(cast("list[Any]", row), name))
            rows.append(_row(name, cells, "cell"))
        else:
            raise ValueError(f"{name} is neither a list of cells nor one text")
    return rows


def _json_cells(row: list[Any], name: str) -> Iterator[str]:
    for number, cell in enumerate(row, 1):
        if cell is not None and not isinstance(cell, str):
            raise ValueError(f"{name}, cell {number} is not a text")
        yield cell or ""


def _row(name: str, cells: list[str], kind: str, rank: int | None = None) -> FileRow:
    if cells and (found := _RANK.match(cells[0])):
        rank = int(found[1])
        cells = [cells[0][found.end() :], *cells[1:]]
    words = tuple(
        (text, f"{name}, {kind} {number}")
        for number, cell in enumerate(cells, 1)
        for text in cell.split()
    )
    return FileRow(name, rank, words)


def _unknown(word: str, cell: str, source: str) -> Problem:
    shown = word if len(word) <= _LONGEST_WORD else word[:_LONGEST_WORD] + "..."
    near = _NEARLY.fullmatch(word.upper())
    return SCHEDULE_ACTION_KNOWN.problem(
        f"{cell}: {shown!a} is not an action such as F0.3 (kind, stage, microbatch)",
        set_by=f"{source}, {cell}",
        suggestions=[f"{near[1]}{int(near[2])}.{int(near[3])}"] if near else ["F", "B", "W", "BW"],
    )


Votes = Mapping[tuple[int, int], Counter[int]]
"""Per (stage, microbatch), how many of its actions stand on each rank."""

_NONE: frozenset[int] = frozenset()


def schedule_from_actions(name: str, actions: Sequence[Sequence[Action]]) -> Schedule:
    """Return the schedule whose ranks run `actions`; stage owners follow from the rows.

    A stage is on the rank that has most of its actions, so that one astray is the odd one. Where it
    fits better, some microbatches are mirrored; the first is not. `check_schedule` says whether
    every action stands where it should. A stage that no row names is put on rank 0, where the
    checker misses its actions.
    """
    num_ranks = len(actions)
    stages = 1 + max((action.stage for row in actions for action in row), default=-1)
    microbatches = 1 + max((action.microbatch for row in actions for action in row), default=-1)
    votes = _votes(actions)
    plain = _owners(votes, stages, num_ranks, mirrored=_NONE)
    mirrored = _mirrored(votes, _owners_of_first(votes, plain), num_ranks)
    folded = _owners(votes, stages, num_ranks, mirrored=mirrored)
    if _num_misplaced(votes, folded, num_ranks, mirrored) >= _num_misplaced(
        votes, plain, num_ranks, _NONE
    ):
        folded, mirrored = plain, _NONE
    return Schedule(
        name=name,
        num_ranks=num_ranks,
        num_microbatches=microbatches,
        stage_ranks=folded,
        mirrored=tuple(sorted(mirrored)),
        actions=tuple(tuple(row) for row in actions),
    )


def _votes(actions: Sequence[Sequence[Action]]) -> Votes:
    votes: dict[tuple[int, int], Counter[int]] = {}
    for rank, row in enumerate(actions):
        for action in row:
            votes.setdefault((action.stage, action.microbatch), Counter())[rank] += 1
    return votes


def _owners(
    votes: Votes, num_stages: int, num_ranks: int, *, mirrored: frozenset[int]
) -> tuple[int, ...]:
    """Return the rank that has most actions of each stage, those of `mirrored` seen in a mirror."""
    owners: dict[int, Counter[int]] = {}
    for (stage, microbatch), found in sorted(votes.items()):
        total = owners.setdefault(stage, Counter())
        for rank, count in found.items():
            total[num_ranks - 1 - rank if microbatch in mirrored else rank] += count
    return tuple(
        owners[stage].most_common(1)[0][0] if stage in owners else 0 for stage in range(num_stages)
    )


def _owners_of_first(votes: Votes, plain: tuple[int, ...]) -> tuple[int, ...]:
    """Return where the first microbatch crosses each stage; `plain` where it does not."""
    first = min((microbatch for _, microbatch in votes), default=0)
    return tuple(
        votes[stage, first].most_common(1)[0][0] if (stage, first) in votes else rank
        for stage, rank in enumerate(plain)
    )


def _mirrored(votes: Votes, owners: tuple[int, ...], num_ranks: int) -> frozenset[int]:
    """Return the microbatches that have more actions on the mirrored ranks than on `owners`."""
    balance: Counter[int] = Counter()
    for (stage, microbatch), found in votes.items():
        rank = owners[stage]
        balance[microbatch] += found[num_ranks - 1 - rank] - found[rank]
    return frozenset(microbatch for microbatch, more in balance.items() if more > 0)


def _num_misplaced(
    votes: Votes, owners: tuple[int, ...], num_ranks: int, mirrored: frozenset[int]
) -> int:
    """Count the actions that do not stand where `owners` and `mirrored` say."""
    return sum(
        found.total() - found[num_ranks - 1 - owners[stage] if m in mirrored else owners[stage]]
        for (stage, m), found in votes.items()
    )
