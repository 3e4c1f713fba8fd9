"""`--html`: what a command found as a page, or each figure of the page as a file, SVG or PNG.

What the value ends in says which: FILE.html is the page; NAME.svg and NAME.png are figures, each in
a file NAME-PART.svg; any other name is a folder to make, with each figure as PART.svg.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from echelon.cli.flags import bad_argument, free_path, require_new_files
from echelon.cli.output import note
from echelon.core.errors import ConfigError

if TYPE_CHECKING:
    from echelon.page.document import PageDocument

Html = Annotated[
    Path | None,
    Parameter(
        name=("--html", "--figures"),
        help="Write a page as FILE.html that opens anywhere, or its figures: SVGs into this new "
        "folder, or files as NAME.svg or NAME.png.",
    ),
]
"""The flag of each command that has a page."""

_PAGE = ".html"
_OF_OTHERS = frozenset(
    (
        *(".htm", ".pdf", ".jpg", ".jpeg", ".gif", ".webp", ".eps", ".ps", ".md", ".txt"),
        *(".json", ".toml", ".yaml", ".yml", ".csv", ".py", ".sh"),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFiles:
    """Hold where what a command found is to be written; it was free when this was made."""

    path: Path

    @classmethod
    def at(cls, path: Path | None) -> ReportFiles | None:
        """Return where a flag says, None without it; ConfigError where nothing can be written.

        EnvironmentProblem where it asks for PNG, and what draws it is not installed.
        """
        if path is None:
            return None
        found = cls(path=path)
        if path.suffix.lower() in _OF_OTHERS:
            free = (
                free_path(path.parent, path.stem or "report", end) for end in (_PAGE, "", ".png")
            )
            raise bad_argument(
                f"{found.flag} {path} would hold a page (HTML) or figures (SVG, PNG), which its "
                "name does not say",
                *(f"{found.flag} {one}" for one in free),
            )
        if found.is_page:
            require_new_files({found.flag: path})
        else:
            found._require_figures()
        return found

    def _require_figures(self) -> None:
        from echelon.page.drawn.files import FigureFiles

        files = FigureFiles.at(self.path)
        try:
            files.require(self.flag)
        except ConfigError as error:
            if files.stem or not os.path.lexists(self.path):
                raise
            free = free_path(self.path.parent, self.path.name, "")
            problems = [replace(one, suggestions=(f"--figures {free}",)) for one in error.problems]
            raise ConfigError(problems) from None

    @property
    def is_page(self) -> bool:
        """Return whether it is a page, and not its figures."""
        return self.path.suffix.lower() == _PAGE

    @property
    def flag(self) -> str:
        """Return the flag that asked for it, by the name that says what is written."""
        return "--html" if self.is_page else "--figures"

    def write(self, document: PageDocument) -> None:
        """Write the page, or each of its figures, and say on stderr where."""
        if self.is_page:
            from echelon.page.html import write_page

            write_page(document, self.path, key=self.flag)
            note(f"written: {self.path}")
            return
        from echelon.page.drawn.files import FigureFiles

        for path in FigureFiles.at(self.path).write(document, key=self.flag):
            note(f"written: {path}")
