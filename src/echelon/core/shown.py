"""What a notebook shows of a record: HTML that the page's floor makes when a notebook asks for it.

Records know the module by its name only, as they are floors below it and cost nothing to import.
"""

from __future__ import annotations

from importlib import import_module

_NOTEBOOK = "echelon.page.notebook"


def notebook_html(view: str, record: object) -> str:
    """Return the HTML of a record by the function `view` of the page's `notebook` module."""
    return getattr(import_module(_NOTEBOOK), view)(record)
