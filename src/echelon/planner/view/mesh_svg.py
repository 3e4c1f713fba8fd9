"""The mesh map as one SVG figure: the axes, nodes as boxes with their devices, and the others.

Devices of one pipeline rank have one color; a pointer on a device shows its coordinates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from echelon.core.svg import figure, fill, rect, style, text, text_width
from echelon.planner.view.mesh_map import MapDevice, MeshMap
from echelon.planner.view.scale import MARGIN, PAGE, TEXT, TICK, TITLE_LINE, shortened

_HUES = (212, 36, 145, 350, 265, 55, 185, 310)  # degrees
_LIGHT = 0.82  # lightness, 0 to 1
_LINE = 15  # pixels
_GAP = 4  # pixels
_INSIDE = PAGE - 2 * MARGIN
_PARTS_IN_ROW = 2  # names
_RULES = """\
.cell { font-size: 11px; fill: #14181d; text-anchor: middle; }
.node { fill: none; stroke: #8b949e; stroke-width: 1; }
.head { font-size: 12px; font-weight: 600; fill: #444c56; }
.number { font-size: 12px; fill: #444c56; text-anchor: end; }
"""
_DARK = """\
  .head, .number { fill: #b1bac4; }
"""


def mesh_svg(found: MeshMap, *, title: str = "Mesh") -> str:
    """Return the map as a figure."""
    body = [text(MARGIN, MARGIN + 14, shortened(title, _INSIDE / 1.15, 14), "title")]
    y = MARGIN + TITLE_LINE + 12.0
    for words in found.head():
        body.append(text(MARGIN, y, shortened(words, _INSIDE), "key"))
        y += 18
    if found.facts:
        body.extend(_table(found.rows(), y + 8))
        y += 14 + 18 * (len(found.facts) + 1)
    for words in found.shared_ways():
        body.append(text(MARGIN, y, shortened(words, _INSIDE), "key"))
        y += 18
    for node in found.shown_nodes:
        body.append(text(MARGIN, y + 12, shortened(found.node_title(node), _INSIDE / 1.15), "head"))
        drawn, y = _node(found.devices(node), y + 20)
        body.extend(drawn)
    if parts := found.parts():
        drawn, y = _parts(parts, y + 4)
        body.extend(drawn)
    return figure(
        body,
        name=title,
        description=_says(found),
        rules=style(_RULES + _fills(), _DARK),
        width=PAGE,
        height=y + MARGIN,
    )


def _table(rows: Sequence[Sequence[str]], top: float) -> Iterator[str]:
    """Yield rows of text in columns: words start at their column, numbers end there."""
    right = [place in (1, 2, 4, 5) for place in range(7)]
    widths = [max(text_width(row[place], TEXT * 1.15) for row in rows) for place in range(6)]
    widths.append(_INSIDE - sum(widths) - 14 * 6)
    for count, row in enumerate(rows):
        x = float(MARGIN)
        for words, width, to_right in zip(row, widths, right, strict=True):
            name = "head" if count == 0 and not to_right else "number" if to_right else "key"
            shown = shortened(words, width / 1.15)
            yield text(x + width if to_right else x, top + 4 + 18 * count, shown, name)
            x += width + 14


def _node(devices: Sequence[MapDevice], top: float) -> tuple[list[str], float]:
    """Return the boxes of a node and of its devices, and where they end."""
    cells = [(str(device.rank), *device.coordinates) for device in devices]
    least = max(text_width(words, TICK) for cell in cells for words in cell) + 10
    most = max(int((_INSIDE - _GAP) // (max(least, 60) + _GAP)), 1)
    in_row = -(-len(cells) // -(-len(cells) // most))
    width = min((_INSIDE - _GAP) / in_row - _GAP, 120)
    height = _LINE * len(cells[0]) + 6
    num_rows = -(-len(cells) // in_row)
    bottom = top + num_rows * (height + _GAP) + _GAP
    drawn = [rect("node", MARGIN, top, in_row * (width + _GAP) + _GAP, bottom - top)]
    for place, (device, cell) in enumerate(zip(devices, cells, strict=True)):
        row, column = divmod(place, in_row)
        x = MARGIN + _GAP + column * (width + _GAP)
        y = top + _GAP + row * (height + _GAP)
        tip = " ".join([f"rank {device.rank}", *device.coordinates])
        drawn.append(rect(f"box pp{device.pp % len(_HUES)}", x, y, width, height, tip))
        for line, words in enumerate(cell):
            drawn.append(text(x + width / 2, y + 13 + _LINE * line, words, "cell"))
    return drawn, bottom + 8


def _parts(parts: Sequence[str], top: float) -> tuple[list[str], float]:
    """Return a box for each part of the pipeline, and where they end."""
    drawn = [text(MARGIN, top + 12, "all nodes, by pipeline rank", "head")]
    top += 20
    width = (_INSIDE + _GAP) / _PARTS_IN_ROW - _GAP
    for place, words in enumerate(parts):
        row, column = divmod(place, _PARTS_IN_ROW)
        x, y = MARGIN + column * (width + _GAP), top + row * (22 + _GAP)
        number = words.removeprefix("pp").split(":")[0]
        name = f"box pp{int(number) % len(_HUES)}" if number.isdigit() else "box rest"
        drawn.append(rect(name, x, y, width, 22, words))
        drawn.append(text(x + width / 2, y + 15, shortened(words, width - 8, TICK), "cell"))
    return drawn, top + -(-len(parts) // _PARTS_IN_ROW) * (22 + _GAP)


def _says(found: MeshMap) -> str:
    axes = [
        f"groups of {fact.axis} have {fact.degree} ranks on {fact.most_nodes} "
        f"node{'s' * (fact.most_nodes > 1)} at most"
        for fact in found.facts
    ]
    return ". ".join([*found.head(), *axes])


def _fills() -> str:
    fills = [f".pp{place} {{ fill: {fill(hue, _LIGHT)}; }}" for place, hue in enumerate(_HUES)]
    return "\n".join([*fills, f".rest {{ fill: {fill(0, _LIGHT, 0.0)}; }}"]) + "\n"
