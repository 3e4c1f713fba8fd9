# SPDX-License-Identifier: Apache-2.0
"""A drawing as PNG, by resvg: a package of one wheel, without a browser and without a system's own.

It is an extra, `png`. Where it is missing, or finds no font, PNG is refused before any work.
"""

from __future__ import annotations

from typing import Any, cast

from echelon.core.errors import EnvironmentProblem
from echelon.core.optional import optional_package
from echelon.core.rulebook.config import FONT_INSTALLED
from echelon.page.drawn.marks import Drawing, svg_file

ZOOM = 2.0
"""The dots of a PNG for each pixel of a drawing."""
_EMPTY = '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20">{}</svg>'
_LETTER = (
    '<text x="2" y="16" font-size="16" font-family="Arial, \'DejaVu Sans\', sans-serif">M</text>'
)


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
