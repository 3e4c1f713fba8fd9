"""A registry, and the plugins that add to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from echelon.core.choices.registry import (
    Registry,
    load_plugins,
    load_reference,
    loaded_plugins,
    use_plugins,
)
from tests.core.choices.loaded import plugins


@dataclass(frozen=True)
class _Record:
    name: str
    tool_names: Mapping[str, str] = field(default_factory=dict[str, str])


COLOURS = Registry("colour", [_Record("red")])


def green() -> None:
    """Register a colour."""
    COLOURS.register(_Record("green"))


def blue() -> None:
    """Register another colour."""
    COLOURS.register(_Record("blue"))


GREEN, BLUE = f"{__name__}:green", f"{__name__}:blue"


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="there is a colour 'red' already"):
        COLOURS.register(_Record("red"))


def test_a_plugin_is_forgotten_where_it_is_not_used() -> None:
    with plugins(GREEN):
        assert tuple(COLOURS) == ("red", "green")
        assert COLOURS["green"].name == "green"
        assert loaded_plugins() == (GREEN,)
    assert tuple(COLOURS) == ("red",)
    assert "green" not in COLOURS
    assert loaded_plugins() == ()


def test_a_plugin_is_loaded_once() -> None:
    with plugins():
        load_plugins([GREEN, GREEN])
        load_plugins([GREEN])
        assert tuple(COLOURS) == ("red", "green")


def test_a_rank_has_the_plugins_of_the_job_and_no_others() -> None:
    with plugins(GREEN):
        use_plugins([BLUE])
        assert tuple(COLOURS) == ("red", "blue")
        use_plugins([])
        assert tuple(COLOURS) == ("red",)


def test_a_reference_names_what_a_module_has() -> None:
    assert load_reference(f"{__name__}:COLOURS") is COLOURS
