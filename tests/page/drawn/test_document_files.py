"""Figures as files: one for each, where the name says, over nothing that is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.core.errors import ConfigError, EchelonError
from echelon.page.drawn import document as png
from echelon.page.drawn.document import FigureFiles, drawing
from echelon.page.drawn.marks import svg_file
from echelon.planner.view.document import PageDocument
from tests.page.browser.documents import documents


def page() -> PageDocument:
    return documents()["plan"]


NAMES = ["memory", "step", "schedule", "mesh", "sent"]


def test_a_folder_has_each_figure_as_it_is_drawn(tmp_path: Path) -> None:
    files = FigureFiles.at(tmp_path / "figures.v1" / "of").write
    with pytest.raises(ConfigError) as caught:
        # Its parent is missing: nothing is made half.
        files(page(), key="--out")
    assert caught.value.rules == ("cannot-write",)
    paths = FigureFiles.at(tmp_path / "figures.v1").write(page(), key="--out")
    assert [path.name for path in paths] == [f"{name}.svg" for name in NAMES]
    sections = {one.id: one for one in page().sections}
    for path in paths:
        found = drawing(sections[path.stem])
        assert found is not None
        assert path.read_text(encoding="utf-8") == svg_file(found)


def test_a_name_begins_those_of_its_files(tmp_path: Path) -> None:
    paths = FigureFiles.at(tmp_path / "nano.svg").write(page(), key="--out")
    assert [path.name for path in paths] == [f"nano-{name}.svg" for name in NAMES]
    with pytest.raises(ConfigError) as caught:
        FigureFiles.at(tmp_path / "nano.svg").write(page(), key="--out")
    assert caught.value.rules == ("never-overwrite",)
    assert caught.value.problems[0].suggestions == (f"--out {tmp_path / 'nano2.svg'}",)
    assert len(list(tmp_path.iterdir())) == len(NAMES)


def test_a_folder_that_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        FigureFiles.at(tmp_path).write(page(), key="--out")
    assert caught.value.rules == ("never-overwrite",)
    assert list(tmp_path.iterdir()) == []


def test_png_is_refused_by_a_rule_where_what_draws_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("echelon.core.optional.import_module", missing)
    with pytest.raises(EchelonError) as caught:
        FigureFiles.at(tmp_path / "nano.png").require("--out")
    assert caught.value.exit_code == 3
    assert caught.value.rules == ("package-installed",)
    assert "[png]'" in caught.value.problems[0].suggestions[0]


def test_png_is_refused_where_there_is_no_font(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wordless:
        @staticmethod
        def svg_to_bytes(svg_string: str) -> bytes:
            return b"the same"

    monkeypatch.setattr(png, "optional_package", lambda *_, **__: Wordless)
    with pytest.raises(EchelonError) as caught:
        png.require_png()
    assert caught.value.rules == ("font-installed",)
