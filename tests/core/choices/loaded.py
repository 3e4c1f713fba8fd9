"""Plugins of a test."""

from __future__ import annotations

from contextlib import contextmanager

from echelon.core.choices.registry import loaded_plugins, use_plugins
from echelon.inference.generator import Generator


@contextmanager
def plugins(*references: str) -> Generator[None, None, None]:
    """Load plugins for as long as a block runs."""
    before = loaded_plugins()
    use_plugins((*before, *references))
    try:
        yield
    finally:
        use_plugins(before)
