"""Take the advice of an error: "a.b = 1 with c.d = 2" as the --set flags that it stands for."""

from __future__ import annotations

from collections.abc import Sequence


def taken(advice: str, sets: Sequence[str]) -> list[str]:
    """Return `sets` with a suggested change made."""
    changes = dict(part.split(" = ", 1) for part in advice.split(" with "))
    assert all("." in key for key in changes), advice
    kept = [text for text in sets if text.partition("=")[0] not in changes]
    return [*kept, *(f"{key}={value}" for key, value in changes.items())]
