# SPDX-License-Identifier: Apache-2.0
"""Ranks on the devices of nodes, with the group of rank 0 on the innermost axis, as links go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, sqrt

from echelon.page.drawn.marks import (
    ACCENT,
    FAINT,
    PAGE,
    SMALL,
    TONES,
    Drawing,
    colored,
    key,
    paragraph,
    shortened,
    words,
)
from echelon.planner.view.document import MeshAxis, MeshFigure

MOST_RANKS = 16384
"""Ranks that are drawn: no more can be told apart."""
_CELLS = (56, 44, 34, 26, 22, 16, 12, 9, 7, 5, 4, 3)  # pixels of a rank
_TALLEST = 560  # pixels, where cells are not the smallest
_NAMED = 22  # pixels of a cell from which ranks and nodes are named
_MOST_RUNS = 48  # runs of ranks that are named


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Hold how ranks are laid out, in pixels and counts."""

    cell: int
    node_columns: int
    device_columns: int
    node_width: int
    node_height: int
    height: int

    @property
    def top(self) -> int:
        """Return the pixels above the devices of a node, where its name stands."""
        return 16 if self.cell >= _NAMED else 0

    def place(self, rank: int, per_node: int) -> tuple[float, float]:
        """Return where the cell of a rank begins."""
        node, device = divmod(rank, per_node)
        row, column = divmod(node, self.node_columns)
        down, right = divmod(device, self.device_columns)
        return (
            column * self.node_width + right * self.cell,
            row * self.node_height + self.top + down * self.cell,
        )


def draw_mesh(found: MeshFigure, name: str, says: str) -> Drawing:
    """Return the drawing of ranks on nodes, and the groups of rank 0 in words."""
    axis = found.axes[-1] if found.axes else None
    entries = [(ACCENT, "rank 0")]
    if axis is not None:
        entries.append((TONES["communication"], f"its {axis.name} group"))
    entries.append((TONES["idle"], "other ranks, stronger in later pipeline stages"))
    body, top = key(entries, top=0)
    drawn, bottom = _ranks(found, axis, top)
    body += drawn
    if found.ranks > MOST_RANKS:
        said = f"The first {MOST_RANKS:,} of {found.ranks:,} ranks are drawn."
        drawn, bottom = paragraph(said, 0, bottom, PAGE)
        body += drawn
    for one in found.axes:
        ranks = ranks_text(group(one, 0))
        said = f"{one.name} 0 of {one.degree} ({one.link}; {one.where}): ranks {ranks}"
        drawn, bottom = paragraph(said, 0, bottom, PAGE)
        body += drawn
    return Drawing(name=name, description=says, width=PAGE, height=bottom, body=tuple(body))


def group(axis: MeshAxis, rank: int) -> list[int]:
    """Return all ranks that differ from `rank` in the digits of one axis alone, rising."""
    found = [rank]
    for digit in axis.digits:
        found = [
            one + (place - one // digit.stride % digit.degree) * digit.stride
            for one in found
            for place in range(digit.degree)
        ]
    return sorted(found)


def ranks_text(ranks: list[int]) -> str:
    """Return ranks in words: neighbours are joined, and a long list is cut."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    said = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    more = len(said) - _MOST_RUNS
    return ", ".join(said[:_MOST_RUNS]) + (f" and {more} more" if more > 0 else "")


def coordinate(axis: MeshAxis, rank: int) -> int:
    """Return the coordinate of a rank on an axis."""
    value = 0
    for digit in axis.digits:
        value = value * digit.degree + rank // digit.stride % digit.degree
    return value


def _layout(found: MeshFigure) -> _Layout:
    ranks, per_node = min(found.ranks, MOST_RANKS), max(found.devices_per_node, 1)
    nodes, inside = ceil(ranks / per_node), max(min(per_node, ranks), 1)
    columns = ceil(sqrt(inside * 2))
    for cell in _CELLS:
        gap = 12 if cell >= 12 else 6 if cell >= 7 else 3
        width = columns * cell + gap
        height = ceil(inside / columns) * cell + gap + (16 if cell >= _NAMED else 0)
        beside = max(1, min(nodes, PAGE // width))
        whole = ceil(nodes / beside) * height
        if (width <= PAGE and whole <= _TALLEST) or cell == _CELLS[-1]:
            break
    return _Layout(
        cell=cell,
        node_columns=beside,
        device_columns=columns,
        node_width=width,
        node_height=height,
        height=whole,
    )


def _ranks(found: MeshFigure, axis: MeshAxis | None, top: float) -> tuple[list[str], float]:
    """Return the cells of ranks, those of one fill in one path, and where they end."""
    at, per_node = _layout(found), max(found.devices_per_node, 1)
    members = set(group(axis, 0)) if axis is not None else {0}
    stages = next((one for one in found.axes if one.name == "pp"), None)
    size = at.cell - (2 if at.cell >= 9 else 1 if at.cell >= 5 else 0.5)
    fills: dict[tuple[str, float], list[tuple[float, float]]] = {}
    body: list[str] = []
    for rank in range(min(found.ranks, MOST_RANKS)):
        x, y = at.place(rank, per_node)
        fill = ACCENT if rank == 0 else TONES["communication" if rank in members else "idle"]
        shade = 1.0
        if rank not in members and stages is not None:
            shade = 0.35 + 0.5 * (coordinate(stages, rank) + 1) / stages.degree
        elif rank not in members:
            shade = 0.6
        fills.setdefault((fill, shade), []).append((x, y + top))
        if at.cell >= _NAMED:
            look = colored("#ffffff") if rank in members else ""
            body += _names(found, rank, (x + 3, y + top), at, look)
            if rank % per_node == 0:
                node = f"node {rank // per_node}"
                body.append(words(x, y + top - 4, node, size=SMALL, look=FAINT))
    cells = [_cells(places, size, fill, shade) for (fill, shade), places in fills.items()]
    return [*cells, *body], top + at.height


def _cells(places: list[tuple[float, float]], size: float, fill: str, shade: float) -> str:
    shapes = "".join(f"M{x:g} {y:g}h{size:g}v{size:g}h-{size:g}z" for x, y in places)
    return f'<path d="{shapes}" fill="{fill}" fill-opacity="{shade:.3g}"/>'


def _names(
    found: MeshFigure, rank: int, at: tuple[float, float], layout: _Layout, look: str
) -> Iterator[str]:
    x, y = at
    yield words(x, y + 12, shortened(str(rank), layout.cell - 6, SMALL), size=SMALL, look=look)
    if layout.cell >= 44:
        for line, one in enumerate(found.axes[:3]):
            said = f"{one.name.replace('dp_', '')} {coordinate(one, rank)}"
            shown = shortened(said, layout.cell - 5, 9)
            yield words(x, y + 24 + 11 * line, shown, size=9, look=look)
