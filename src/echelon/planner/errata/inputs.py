"""What a formula of the errata is: a function of the numbers that a claim gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias


class Inputs:
    """Give the inputs of a claim by the letters that the guide has for them."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Keep the values."""
        self._values = dict(values)

    def __getattr__(self, name: str) -> Any:
        """Return an input; AttributeError where the claim has none of this name."""
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"the claim has no input {name}") from None

    def values(self) -> dict[str, Any]:
        """Return all inputs."""
        return dict(self._values)


Formula: TypeAlias = Callable[[Inputs], object]
"""What computes the value that holds of a claim."""


def unpacked(function: Callable[..., object]) -> Formula:
    """Return a function of all inputs of a claim, each a parameter of its name."""
    return lambda inputs: function(**inputs.values())
