"""What terms look like: a letter and a hue for bytes, a tone for seconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from string import ascii_uppercase
from types import MappingProxyType
from typing import Literal

Tone = Literal["compute", "communication", "waiting"]

_LOOKS: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "parameters": ("P", 212),
        "gradients": ("G", 350),
        "master parameters": ("M", 20),
        "optimizer": ("O", 36),
        "optimizer state": ("O", 36),
        "gathered": ("U", 185),
        "activations": ("A", 145),
        "working": ("W", 165),
        "logits": ("L", 265),
        "buffers": ("B", 55),
        "slack": ("S", 310),
        "context": ("C", 85),
        "other": ("X", 0),
    }
)
_HUES = (230, 5, 165, 290, 70, 200, 330, 110)
MOST_KINDS = 12
OTHER = "other"

_COMPUTE = frozenset({"products", "attention", "memory", "head", "recompute", "optimizer"})
_COMMUNICATION = frozenset({"tensor", "context", "expert", "messages", "gather", "gradients"})

TONES: Mapping[Tone, tuple[str, str]] = MappingProxyType(
    {
        "compute": ("=", "compute"),
        "communication": ("#", "exposed communication"),
        "waiting": (".", "waiting"),
    }
)
"""The mark of each tone in a terminal, and what it is called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Say how a kind of bytes is shown: its upper-case letter, and its hue in degrees."""

    name: str
    letter: str
    hue: int


def tone_of(term: str) -> Tone:
    """Return what a term of a step is; what is neither computed nor sent is waited for."""
    if term in _COMPUTE:
        return "compute"
    return "communication" if term in _COMMUNICATION else "waiting"


def kinds_of(names: Iterable[str]) -> tuple[Kind, ...]:
    """Return a look for each name, no letter twice: the usual ones, then what is left."""
    wanted = list(dict.fromkeys(names))
    taken: set[str] = set()
    letters: dict[str, str] = {}
    for name in wanted:
        letter = _LOOKS.get(name, ("", 0))[0]
        if letter and letter not in taken:
            letters[name] = letter
            taken.add(letter)
    hues = iter(_HUES * (1 + len(wanted) // len(_HUES)))
    found: list[Kind] = []
    for name in wanted:
        if name not in letters:
            letters[name] = next(one for one in _choices(name) if one not in taken)
            taken.add(letters[name])
        hue = _LOOKS[name][1] if name in _LOOKS else next(hues)
        found.append(Kind(name=name, letter=letters[name], hue=hue))
    return tuple(found)


def _choices(name: str) -> Iterator[str]:
    yield from (char for char in name.upper() if char in ascii_uppercase)
    yield from ascii_uppercase
