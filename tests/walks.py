"""Walks over many cases, of which `make test` takes some and `make test-all` takes all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def shortened(cases: Iterable[Any], quick: Callable[[Any], bool]) -> list[Any]:
    """Return parameters of a test: those that are not `quick` belong to `make test-all` only.

    A case that is a tuple gives a value to each of several arguments.
    """
    return [case if quick(case) else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
