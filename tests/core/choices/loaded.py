"""Plugins of a test."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from echelon.core.choices.registry import loaded_plugins, use_plugins

if TYPE_CHECKING:
    from collections.abc import Generator


@contextmanager
def plugins(*references: str) -> Generator[None, None, None]:
    """Load plugins for as long as a block runs."""
    before = loaded_plugins()
    use_plugins((*before, *references))
    try:
        yield
    finally:
        use_plugins(before)
