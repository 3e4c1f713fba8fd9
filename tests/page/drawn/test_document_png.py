"""A drawing as PNG has its size, its fills, and its words."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from echelon.page.drawn.document import ZOOM, FigureFiles, png_bytes, require_png
from echelon.page.drawn.marks import Drawing, box, words
from tests.page.browser.documents import documents

pytest.importorskip("resvg_py", reason="no resvg: pip install '.[png]'")
SIGNATURE = b"\x89PNG\r\n\x1a\n"


def drawing(*body: str) -> Drawing:
    return Drawing(name="a", description="", width=100, height=30, body=body)


def test_it_is_twice_as_large_as_the_drawing_with_its_paper() -> None:
    require_png()
    found = png_bytes(drawing(box((0, 0, 50, 10), "#ff0000")))
    assert found.startswith(SIGNATURE)
    assert struct.unpack(">II", found[16:24]) == (128 * ZOOM, 58 * ZOOM)
    empty, said = png_bytes(drawing()), png_bytes(drawing(words(0, 20, "words")))
    assert len({empty, said, found}) == 3


def test_every_figure_of_a_page_becomes_one(tmp_path: Path) -> None:
    paths = FigureFiles.at(tmp_path / "plan.png").write(documents()["plan"], key="--out")
    assert [path.name for path in paths][:2] == ["plan-memory.png", "plan-step.png"]
    assert all(path.read_bytes().startswith(SIGNATURE) for path in paths)
