"""Other settings of context parallelism, for errors to suggest: `config/tried.py` tries them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from echelon.config.context import DEGREE_KEY, KIND_KEY
from echelon.config.faults import Changes
from echelon.config.kinds import Choice
from echelon.config.schema import SETTINGS
from echelon.config.view import View

KINDS = cast(Choice, SETTINGS[KIND_KEY].kind).options


def other_kinds(view: View) -> Iterator[Changes]:
    """Yield every other way in which context ranks may meet."""
    for kind in KINDS:
        if kind != view.word(KIND_KEY):
            yield with_free_degree(view, {KIND_KEY: kind})


def with_free_degree(view: View, change: Changes) -> Changes:
    """Return a change that also leaves a degree to us where it is set."""
    return change if view.is_default(DEGREE_KEY) else {**change, DEGREE_KEY: "auto"}
