# SPDX-License-Identifier: Apache-2.0
"""References in a YAML of NeMo: `${model.hidden_size}`, `${.hidden_size}`, `${multiply:4, ...}`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_WHOLE = re.compile(r"-?\d{1,15}")
_SUMS: Mapping[str, Callable[[int, int], int]] = {
    "multiply": lambda a, b: a * b,
    "divide_floor": lambda a, b: a // b if b else 0,
}
_DEPTH = 8
"""References of references."""


def fill_references(given: Mapping[str, object]) -> dict[str, object]:
    """Return the keys with what their references mean; what is not in the file stays as it is."""
    return {
        key: _fill(key, value, given) if isinstance(value, str) else value
        for key, value in given.items()
    }


def _fill(key: str, text: str, given: Mapping[str, object]) -> object:
    for _ in range(_DEPTH):
        match = _INNERMOST.search(text)
        if match is None:
            break
        value = _value(key, match[1], given)
        if value is None or (match[0] == text and not isinstance(value, str)):
            return text if value is None else value
        text = text[: match.start()] + str(value) + text[match.end() :]
    return text


def _value(key: str, inner: str, given: Mapping[str, object]) -> object:
    name, colon, arguments = inner.partition(":")
    if colon:
        words = [word.strip() for word in arguments.split(",")]
        if name not in _SUMS or len(words) != 2 or not all(map(_WHOLE.fullmatch, words)):
            return None
        return _SUMS[name](int(words[0]), int(words[1]))
    if name.startswith("."):
        table = key.rpartition(".")[0]
        return given.get(f"{table}{name}")
    return given.get(name, given.get(name.removeprefix("training.")))
