# SPDX-License-Identifier: Apache-2.0
"""Every figure of a page as a file of its own: SVG, or PNG, in a folder or beside one another."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from echelon.config.files.new_file import (
    make_folder,
    require_free_names,
    require_writable,
    write_new,
)
from echelon.core.errors import EnvironmentProblem
from echelon.core.optional import optional_package
from echelon.core.rulebook.config import FONT_INSTALLED
from echelon.page.drawn.figure import drawing
from echelon.page.drawn.marks import Drawing, svg_file
from echelon.planner.view.document import PageDocument

ZOOM = 2.0
"""The dots of a PNG for each pixel of a drawing."""
_EMPTY = '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20">{}</svg>'
_LETTER = (
    '<text x="2" y="16" font-size="16" font-family="Arial, \'DejaVu Sans\', sans-serif">M</text>'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureFiles:
    """Say where figures go: into a new `folder`, or as files whose names begin with `stem`."""

    folder: Path
    stem: str = ""
    form: Literal["svg", "png"] = "svg"

    @classmethod
    def at(cls, path: Path) -> FigureFiles:
        """Return where `path` says: NAME.svg and NAME.png begin names, else it is a folder."""
        stem = f"{path.stem}-"
        match path.suffix.lower():
            case ".svg":
                return cls(folder=path.parent, stem=stem)
            case ".png":
                return cls(folder=path.parent, stem=stem, form="png")
            case _:
                return cls(folder=path)

    def require(self, key: str) -> None:
        """Refuse what cannot be written, before the work for what is to be written."""
        if self.form == "png":
            require_png()
        if not self.stem:
            require_writable(self.folder, key=key)
            return
        ending = f".{self.form}"
        require_free_names(self.folder / f"{self.stem[:-1]}{ending}", ending, key=key)
        require_writable(self.folder / f"{self.stem}figure.{self.form}", key=key)

    def write(self, document: PageDocument, *, key: str) -> tuple[Path, ...]:
        """Write each figure of a page into a new file, and return the files in its order.

        ConfigError where a file or the folder exists, EnvironmentProblem where PNG is not there.
        """
        self.require(key)
        made = {
            self.folder / f"{self.stem}{_plain(section.id)}.{self.form}": found
            for section in document.sections
            if (found := drawing(section)) is not None
        }
        # All are drawn before any is written: what goes wrong leaves no file behind.
        drawn = {
            path: png_bytes(one) if self.form == "png" else svg_file(one)
            for path, one in made.items()
        }
        if not self.stem:
            make_folder(self.folder, key=key)
        for path, content in drawn.items():
            write_new(path, content, key=key)
        return tuple(drawn)


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9-]+", "-", name) or "figure"


def require_png() -> None:
    """Refuse PNG where it can't be made: EnvironmentProblem says what to install."""
    drawer = _drawer()
    drawn = drawer.svg_to_bytes(svg_string=_EMPTY.format(_LETTER))
    if bytes(drawn) == bytes(drawer.svg_to_bytes(svg_string=_EMPTY.format(""))):
        raise EnvironmentProblem(
            FONT_INSTALLED.problem(
                "PNG needs a font for its words, and none was found",
                suggestions=("SVG, which needs none", "apt-get install fonts-dejavu-core"),
            )
        )


def png_bytes(drawing: Drawing) -> bytes:
    """Return a drawing as a PNG on light paper, twice as many dots as it has pixels."""
    text = svg_file(drawing, follows_page=False)
    return bytes(_drawer().svg_to_bytes(svg_string=text, zoom=ZOOM))


def _drawer() -> Any:
    return cast("Any", optional_package("resvg_py", extra="png", purpose="a figure as PNG"))
