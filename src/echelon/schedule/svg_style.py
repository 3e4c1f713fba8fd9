"""The colors of a drawn schedule, and the key to them.

A kind has a hue, a stage of a rank a shade of it: lower stages are lighter. Boxes keep their colors
on light and on dark pages (dark text on a light fill reads on both); page, text and lines change.
"""

from __future__ import annotations

from collections.abc import Collection
from types import MappingProxyType

from echelon.core.event import Event
from echelon.core.svg import fill, key, style
from echelon.schedule.action import ActionKind
from echelon.schedule.messages import Payload

KINDS = MappingProxyType(
    {
        ActionKind.F.value: (212, "forward"),
        ActionKind.BW.value: (350, "backward"),
        ActionKind.B.value: (36, "input gradient"),
        ActionKind.W.value: (145, "weight gradient"),
    }
)
"""The hue and the meaning of each kind of action that is drawn."""

_TALK = MappingProxyType(
    {
        "down": "activation sent",
        "up": "gradient sent",
        "collective": "collective",
    }
)
_LIGHTEST, _DARKEST, _ONLY = 0.86, 0.60, 0.74

STYLE = style(
    light="""\
.down { fill: #4a7fb5; }
.up { fill: #b5654a; }
.collective { fill: #7a6ba8; }
"""
)


def fill_class(kind: str, shade: int) -> str:
    """Return the class of the box of an action, on the stage with that shade."""
    return f"box {kind}{shade}"


def talk_class(event: Event) -> str:
    """Return the class of what is sent."""
    if event.kind != "send":
        return "collective"
    return "up" if event.name.startswith(Payload.GRADIENT.value) else "down"


def shade_rules(num_shades: int) -> str:
    """Return the fills of all kinds in each shade."""
    return "".join(
        f".{kind}{shade} {{ fill: {_color(hue, shade, num_shades)}; }}\n"
        for kind, (hue, _) in KINDS.items()
        for shade in range(num_shades)
    )


def legend(
    names: Collection[str], num_shades: int, *, left: float, right: float, top: float
) -> tuple[list[str], float]:
    """Return the key to the kinds and messages in `names`, and where it ends.

    Entries stand beside one another and go on in a new line at `right`.
    """
    entries: list[tuple[list[str], str]] = [
        ([fill_class(kind, 0)], f"{kind}: {meaning}")
        for kind, (_, meaning) in KINDS.items()
        if kind in names
    ]
    if num_shades > 1 and entries:
        shades = [f"{entries[0][0][0][:-1]}{shade}" for shade in range(num_shades)]
        entries.append((shades, "stages of a rank, lowest first"))
    entries.extend(([name], meaning) for name, meaning in _TALK.items() if name in names)
    return key(entries, left=left, right=right, top=top, thin=_TALK)


def _color(hue: int, shade: int, num_shades: int) -> str:
    light = _ONLY
    if num_shades > 1:
        light = _LIGHTEST - (_LIGHTEST - _DARKEST) * shade / (num_shades - 1)
    return fill(hue, light)
