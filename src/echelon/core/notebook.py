# SPDX-License-Identifier: Apache-2.0
"""Views of records in a notebook, which a floor above registers.

A plan, a proof or a rehearsal knows its view by a name. The page draws it, is floors above, and
imports much: `import echelon` says where views come from, and the first record that a notebook
shows loads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

View = TypeVar("View", bound=Callable[[Any], str])


class NotebookViews:
    """Map names of records to functions that return their HTML."""

    def __init__(self) -> None:
        """Hold no view, and no source of views."""
        self._views: dict[str, Callable[[Any], str]] = {}
        self._source: Callable[[], object] | None = None

    def load_from(self, source: Callable[[], object]) -> None:
        """Remember `source`, which registers views when it is called."""
        self._source = source

    def register(self, name: str) -> Callable[[View], View]:
        """Return a decorator: the function under it draws the records called `name`."""

        def registered(view: View) -> View:
            self._views[name] = view
            return view

        return registered

    def html(self, name: str, record: object) -> str | None:
        """Return the HTML of a record; None without a view, so that a notebook shows its text."""
        if name not in self._views and self._source is not None:
            self._source()
        view = self._views.get(name)
        return None if view is None else view(record)


NOTEBOOK_VIEWS = NotebookViews()
