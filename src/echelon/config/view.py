# SPDX-License-Identifier: Apache-2.0
"""What checks and the resolver read: typed access to settings, and where each was set.

A setting that is missing or was already found wrong raises `Unavailable`, which skips the checks
that need it: one mistake is reported once, and everything independent of it is still checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TypeVar, cast

from echelon.config.entries import DEFAULT, Entry
from echelon.config.schema import SETTINGS
from echelon.core.axis import LOSS_AXES, MESH_AXES, Axis
from echelon.core.cluster import Cluster
from echelon.core.mesh import Mesh
from echelon.core.settings.configured import configured_fields, value_of_field
from echelon.core.settings.value_types import Quantity, Real, Setting, ValueType

T = TypeVar("T")


class Unavailable(Exception):
    """Say that a setting has no usable value; never seen by users."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Hold the merged settings, and the keys that are wrong and must not be used."""

    entries: Mapping[str, Entry]
    wrong: frozenset[str] = field(default_factory=frozenset[str])
    settings: Mapping[str, Setting] = field(default_factory=lambda: SETTINGS)
    cluster: Cluster | None = None
    """The cluster where it is known, as that of a Plan is: settings need not name it."""
    is_resolved: bool = False
    """True for the settings of a Plan, in which nothing is left to us."""

    def entry(self, key: str) -> Entry:
        """Return the entry of a setting, its default where nobody set it."""
        if key in self.wrong:
            raise Unavailable(key)
        if key in self.entries:
            return self.entries[key]
        if self.settings[key].default is None:
            raise Unavailable(key)
        return Entry(value=self.settings[key].default, source=DEFAULT)

    def has(self, key: str) -> bool:
        """Return whether a setting has a value."""
        return key not in self.wrong and (
            key in self.entries or self.settings[key].default is not None
        )

    def has_table(self, table: str) -> bool:
        """Return whether any key of a table was set; Unavailable where one of them is wrong."""
        first = f"{table}."
        if any(key.startswith(first) for key in self.wrong):
            raise Unavailable(table)
        return any(key.startswith(first) for key in self.entries)

    def default(self, key: str) -> object:
        """Return the default of a setting, None where it has none."""
        return self.settings[key].default

    def is_default(self, key: str) -> bool:
        """Return whether a setting has its default value, whoever set it."""
        return self.entry(key).value == self.default(key)

    def value(self, key: str) -> object:
        """Return a value as it stands in a record: a number is a float, 3 as well as 3.0."""
        value = self.entry(key).value
        if isinstance(value, int) and is_real(self.settings[key].kind):
            return float(value)
        return value

    def integer(self, key: str) -> int:
        """Return a whole number."""
        return cast(int, self.entry(key).value)

    def number(self, key: str) -> float:
        """Return a number."""
        return cast(float, self.value(key))

    def flag(self, key: str) -> bool:
        """Return a truth value."""
        return cast(bool, self.entry(key).value)

    def word(self, key: str) -> str:
        """Return a string."""
        return cast(str, self.entry(key).value)

    def stage_lists(self) -> Sequence[Sequence[int]] | None:
        """Return the explicit blocks of each stage, or None for "auto" and "even"."""
        value = self.entry("pipeline.stages").value
        return None if isinstance(value, str) else cast("list[list[int]]", value)

    def path(self, key: str) -> Path:
        """Return a path, taken from the folder of the file that sets it."""
        return self.entry(key).path()

    def set_by(self, *keys: str) -> str:
        """Return where these settings were set, those that somebody set; else "default".

        Of what was chosen, and not written anywhere, there is nothing to say.
        """
        found = {key: self.entries[key].source for key in keys if key in self.entries}
        sources = [
            source if len(keys) == 1 or key in source else f"{source} ({key})"
            for key, source in found.items()
            if source
        ]
        return ", ".join(sources) if found else DEFAULT

    @property
    def model_name(self) -> str:
        """Return what to call the model in a sentence."""
        return self.word("model.name") if self.has("model.name") else "the model"


def is_real(kind: ValueType) -> bool:
    """Return whether a setting takes numbers with a fraction."""
    return isinstance(kind.number if isinstance(kind, Quantity) else kind, Real)


def mesh_of(view: View) -> Mesh:
    """Return the mesh; Unavailable where a degree is wrong."""
    degrees = {axis.value: view.integer(f"mesh.{axis.value}") for axis in MESH_AXES}
    islands = degrees[Axis.DP_REPLICATE] > 1 and view.integer("local_sgd.every") > 0
    return Mesh(
        **degrees,
        ep=view.integer("mesh.ep"),
        replicas_outermost=islands,
        servers=view.integer("servers.count"),
    )


def data_ranks(view: View) -> int:
    """Return how many ranks read different samples."""
    return view.integer("mesh.dp_replicate") * view.integer("mesh.dp_shard")


def gradient_ranks(view: View) -> int:
    """Return over how many ranks gradients are summed: all that see different tokens."""
    return prod(view.integer(f"mesh.{axis.value}") for axis in LOSS_AXES)


def record(view: View, kind: type[T], table: str, /, **given: object) -> T:
    """Return a dataclass whose fields are the settings of `table` ("" for none) or are given."""
    read = {
        name: value_of_field(hint, view.value(f"{table}.{key}" if table else key))
        for name, key, hint in configured_fields(kind)
        if name not in given
    }
    return kind(**read, **given)
