"""How a setting is refused that cannot change anything, or that this version cannot honour."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from echelon.config.kinds import toml_text
from echelon.config.schema import SETTINGS
from echelon.config.view import View
from echelon.core.errors import Problem
from echelon.core.rulebook.config import NO_EFFECT, NOT_BUILT_YET


def no_effect(view: View, key: str, because: str, works: Iterable[str]) -> Iterator[Problem]:
    """Yield the problem of a setting without effect, unless its value is the default."""
    entry = view.entry(key)
    if not view.is_default(key):
        yield NO_EFFECT.problem(
            f"{key} = {toml_text(entry.value)} changes nothing: {because}",
            key=key,
            set_by=entry.source,
            works=(*works, f"{key} = {toml_text(SETTINGS[key].default)}"),
        )


def not_built(view: View, key: str, works: Iterable[str], why: str = "") -> Problem:
    """Return the problem of a setting whose value this version cannot honour."""
    value = toml_text(view.entry(key).value)
    return NOT_BUILT_YET.problem(
        f"{key} = {value} is designed but not built yet{why}",
        key=key,
        set_by=view.set_by(key),
        works=works,
    )
