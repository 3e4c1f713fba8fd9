"""Boxes joined into fewer: full ones side by side or stacked, causal ones along the diagonal.

All of this is arithmetic on rows and columns, whatever positions they hold: so a rank that meets
its own zigzag chunks needs one causal box, and one full box for those of any other rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from echelon.models.attention.boxes import CAUSAL, FULL, Box


def joined(boxes: Iterable[Box]) -> list[Box]:
    """Return the same pairs in fewer boxes, those of many rows first."""
    by_form: dict[str, list[Box]] = {"full": [], "causal": [], "banded": []}
    for box in boxes:
        by_form[box.form].append(box)
    full = _side_by_side(by_form["full"])
    causal, full = _along_diagonal(by_form["causal"], full)
    found = [*_stacked(full), *causal, *by_form["banded"]]
    return sorted(found, key=lambda box: (-box.num_queries, box.q_first, box.k_first))


def _side_by_side(full: list[Box]) -> list[Box]:
    """Join full boxes of the same rows whose columns adjoin."""
    found: list[Box] = []
    for box in sorted(full, key=lambda box: (box.q_first, box.q_last, box.k_first)):
        last = found[-1] if found else None
        same_rows = last and (last.q_first, last.q_last) == (box.q_first, box.q_last)
        if last and same_rows and last.k_last == box.k_first:
            found[-1] = Box(last.q_first, last.q_last, last.k_first, box.k_last, FULL)
        else:
            found.append(box)
    return found


def _stacked(full: list[Box]) -> list[Box]:
    """Join full boxes of the same columns whose rows adjoin."""
    turned = [Box(box.k_first, box.k_last, box.q_first, box.q_last, FULL) for box in full]
    return [
        Box(box.k_first, box.k_last, box.q_first, box.q_last, FULL) for box in _side_by_side(turned)
    ]


def _along_diagonal(causal: list[Box], full: list[Box]) -> tuple[list[Box], list[Box]]:
    """Join a causal square, the one at its lower right corner, and the full box below the first.

    The full box may be a part of a wider one: the rest of that remains.
    """
    rows_of: defaultdict[tuple[int, int], list[Box]] = defaultdict(list)
    for box in full:
        rows_of[box.q_first, box.q_last].append(box)
    found: list[Box] = []
    by_corner: dict[tuple[int, int], int] = {}
    for box in sorted(causal, key=lambda box: box.q_first):
        joins, upper = box, by_corner.pop((box.q_first, box.k_first), None)
        if upper is not None and _take(rows_of[box.q_first, box.q_last], found[upper]):
            joins = Box(found[upper].q_first, box.q_last, found[upper].k_first, box.k_last, CAUSAL)
            found[upper] = joins
        else:
            upper = len(found)
            found.append(box)
        if joins.num_queries == joins.num_keys:
            by_corner[joins.q_last, joins.k_last] = upper
    return found, [box for boxes in rows_of.values() for box in boxes]


def _take(full: list[Box], upper: Box) -> bool:
    """Take the columns of `upper` out of the full boxes of one set of rows, if they are there."""
    for place, box in enumerate(full):
        if box.k_first <= upper.k_first and upper.k_last <= box.k_last:
            first, last = upper.k_first - box.k_first, upper.k_last - box.k_first
            rests = (box.columns(0, first), box.columns(last, box.num_keys))
            full[place : place + 1] = [rest for rest in rests if rest.num_keys]
            return True
    return False
