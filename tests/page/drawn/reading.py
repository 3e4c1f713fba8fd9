"""Read a drawing back: its boxes, its words, and whether words stand in one another's way."""

from __future__ import annotations

import re
from itertools import combinations
from xml.etree import ElementTree

from echelon.core.svg import text_width
from echelon.page.drawn.marks import TEXT, Drawing, svg_file, svg_inside

NAMESPACE = "{http://www.w3.org/2000/svg}"
HOSTILE = '</svg></script><img src=x onerror="alert(1)">\x00\u202e&amp;' + "x" * 400
Place = tuple[float, float, float, float]


def root_of(drawing: Drawing) -> ElementTree.Element:
    """Return the root of a drawing as a file, which must be XML that says what it is."""
    text = svg_file(drawing)
    root = ElementTree.fromstring(text)
    assert root[0].tag == f"{NAMESPACE}title"
    assert root.get("role") == "img"
    assert "@media (prefers-color-scheme: dark)" in text
    inside = svg_inside(drawing)
    ElementTree.fromstring(inside)
    # Nothing in it changes what stands around it, and nothing is loaded or run.
    assert not re.search(r"<style|\bclass=|\bid=|href|<script|<image|url\(", inside)
    return root


def boxes(drawing: Drawing) -> dict[str, Place]:
    """Return left, top, width and height of each box that has a tip, by its tip."""
    found: dict[str, Place] = {}
    for one in root_of(drawing).iter(f"{NAMESPACE}rect"):
        if len(one):
            place = [float(one.attrib[name]) for name in ("x", "y", "width", "height")]
            found[one[0].text or ""] = (place[0], place[1], place[2], place[3])
    return found


def texts(drawing: Drawing) -> list[str]:
    """Return the words of a drawing in order."""
    return [one.text or "" for one in root_of(drawing).iter(f"{NAMESPACE}text")]


def paths(drawing: Drawing) -> list[ElementTree.Element]:
    """Return the paths of a drawing."""
    return [*root_of(drawing).iter(f"{NAMESPACE}path")]


def assert_words_are_clear(drawing: Drawing) -> None:
    """Check that all words lie on the paper and no two overlap, in the widest of the fonts."""
    root = root_of(drawing)
    found = [one for one in root.iter(f"{NAMESPACE}text") if one.text]
    placed = [(_place(one), one.text) for one in found]
    for (left, top, right, bottom), said in placed:
        assert left >= -14, said
        assert right <= drawing.width + 14, said
        assert top >= -14, said
        assert bottom <= drawing.height + 14, said
    for (one, first), (other, second) in combinations(placed, 2):
        apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
        assert apart, (first, second)


def _place(node: ElementTree.Element) -> Place:
    size = float(node.get("font-size", TEXT))
    width = text_width(node.text or "", size)
    anchor = {"start": 0.0, "middle": width / 2, "end": width}[node.get("text-anchor", "start")]
    left, y = float(node.attrib["x"]) - anchor, float(node.attrib["y"])
    return left, y - 0.78 * size, left + width, y + 0.22 * size
