# SPDX-License-Identifier: Apache-2.0
"""Every figure of a page as a file of its own: SVG, or PNG, in a folder or beside one another."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from echelon.config.files.new_file import (
    make_folder,
    require_free_names,
    require_writable,
    write_new,
)
from echelon.page.document import PageDocument
from echelon.page.drawn.figure import drawing
from echelon.page.drawn.marks import svg_file
from echelon.page.drawn.png import png_bytes, require_png


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
