"""Draw a circle of waits: where each rank stands in its list, and what it waits for.

    +-> rank 0:  F0.0 [BW0.0] (F0.1) BW0.1
    |              |  cannot start BW0.0 before BW1.0
    |              v
    |   rank 1:  F1.0 [F1.1] (BW1.0) BW1.1
    |              |  cannot start F1.1 before F0.1
    +--------------+

Each arrow leads to the rank that is waited for: there, what would end the wait stands in ( ),
behind the action in [ ] that cannot start, or in it: [(F1.1)].
"""

from __future__ import annotations

from collections.abc import Iterator

from echelon.schedule.action import Action, Schedule
from echelon.schedule.cells import NO_FILE, Cells
from echelon.schedule.deadlock import Wait

_LEGEND = "[ ] cannot start      ( ) would end the wait of the rank whose arrow comes here"


def draw_stuck(schedule: Schedule, circle: tuple[Wait, ...], cells: Cells = NO_FILE) -> str:
    """Return the circle that `stuck_cycle` found as text; nothing where there is none."""
    if not circle:
        return ""
    return "\n".join([*_lines(schedule, circle, cells), _LEGEND]) + "\n"


def _lines(schedule: Schedule, circle: tuple[Wait, ...], cells: Cells) -> Iterator[str]:
    labels = [f"rank {wait.rank}:" for wait in circle]
    margin = max(map(len, labels)) + 2
    stem = " " * (margin + 2)
    awaited = circle[-1:] + circle[:-1]
    for place, (wait, before, label) in enumerate(zip(circle, awaited, labels, strict=True)):
        row = schedule.actions[wait.rank]
        arrow = "+-> " if place == 0 else "|   "
        yield arrow + label.ljust(margin) + _row(row, wait.action, before.waits_for)
        at = f" ({cells.at(wait.rank, row.index(wait.action))})" if cells.source else ""
        yield f"|   {stem}|  cannot start {wait.action}{at} before {wait.waits_for}"
        if place < len(circle) - 1:
            yield f"|   {stem}v"
    yield "+" + "-" * (len(stem) + 3) + "+"


def _row(row: tuple[Action, ...], stands_at: Action, awaited: Action) -> str:
    """Return the list of a rank around the two actions that matter, dots for what lies between."""
    head, wanted = row.index(stands_at), row.index(awaited)
    shown = sorted(
        place
        for place in {head - 2, head - 1, head, head + 1, wanted - 1, wanted, wanted + 1}
        if 0 <= place < len(row)
    )
    words: list[str] = []
    last = -1
    for place in shown:
        if place > last + 1:
            words.append("...")
        last = place
        word = f"({row[place]})" if place == wanted else str(row[place])
        words.append(f"[{word}]" if place == head else word)
    if last < len(row) - 1:
        words.append("...")
    return " ".join(words)
