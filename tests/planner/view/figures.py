"""Read a figure back: its boxes, its texts, and whether texts stand in one another's way."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import combinations
from xml.etree import ElementTree

from rich.cells import cell_len

from echelon.core.svg import text_width
from echelon.planner.view.lines import WIDTH, TextLine

NAMESPACE = "{http://www.w3.org/2000/svg}"
Box = tuple[float, float, float, float]


def text_of(lines: Iterable[TextLine]) -> str:
    """Return lines for a terminal as text without colors, each with its end."""
    return "".join("".join(span.text for span in line).rstrip() + "\n" for line in lines)


def root_of(figure: str) -> ElementTree.Element:
    """Return the root of a figure, which must be XML with a title, a description, two grounds."""
    root = ElementTree.fromstring(figure)
    assert root[0].tag == f"{NAMESPACE}title"
    assert root[1].tag == f"{NAMESPACE}desc"
    assert root.get("role") == "img"
    assert "@media (prefers-color-scheme: dark)" in figure
    return root


def rects(figure: str, name: str) -> list[ElementTree.Element]:
    """Return the boxes of a class that have a tip: those of the key have none."""
    found = root_of(figure).iter(f"{NAMESPACE}rect")
    return [box for box in found if name in box.get("class", "").split() and len(box)]


def tip(box: ElementTree.Element) -> str:
    """Return what a box says where a pointer rests on it."""
    return box[0].text or ""


def number(node: ElementTree.Element, name: str) -> float:
    """Return an attribute that is a number."""
    return float(node.attrib[name])


def texts(figure: str, name: str) -> list[str]:
    """Return the texts of a class."""
    found = root_of(figure).iter(f"{NAMESPACE}text")
    return [node.text or "" for node in found if node.get("class") == name]


def assert_texts_are_clear(figure: str) -> None:
    """Check that every text lies in the page and no two overlap, in the widest of the fonts."""
    root = root_of(figure)
    rules = _rules(figure)
    placed = [(_box(node, rules), node.text) for node in root.iter(f"{NAMESPACE}text") if node.text]
    width, height = number(root, "width"), number(root, "height")
    for (left, top, right, bottom), words in placed:
        assert left >= 0, words
        assert right <= width, words
        assert top >= 0, words
        assert bottom <= height, words
    for (one, first), (other, second) in combinations(placed, 2):
        apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
        assert apart, (first, second)


def assert_narrow(text: str) -> None:
    """Check that no line of a terminal text is too wide."""
    assert text.endswith("\n")
    assert max(map(cell_len, text.split("\n"))) <= WIDTH


def _box(node: ElementTree.Element, rules: dict[str, tuple[float, str]]) -> Box:
    size, anchor = rules[node.attrib["class"]]
    size = float(node.get("font-size", size))
    width = text_width(node.text or "", size)
    left = number(node, "x") - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
    y = number(node, "y")
    return left, y - 0.78 * size, left + width, y + 0.22 * size


def _rules(figure: str) -> dict[str, tuple[float, str]]:
    """Return the size and the anchor of the texts of each class, as the style says."""
    light = figure.split("@media", maxsplit=1)[0]
    found: dict[str, tuple[float, str]] = {}
    for names, body in re.findall(r"^(\.[^{]+) \{([^}]*)\}", light, re.MULTILINE):
        size = re.search(r"font-size: (\d+)px", body)
        anchor = re.search(r"text-anchor: (\w+)", body)
        for name in names.split(","):
            found[name.strip().removeprefix(".")] = (
                float(size[1]) if size else 16.0,
                anchor[1] if anchor else "start",
            )
    return found
