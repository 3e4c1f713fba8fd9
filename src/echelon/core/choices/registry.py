# SPDX-License-Identifier: Apache-2.0
"""Records of the choices that users can make, and the plugins that add to them.

A schedule, an optimizer, a context kind is one record: plain facts, and for what stands on a higher
floor the name "package.module:name" of it, which is imported where it is used. Ours are listed
where the registry is made. Others come from plugins: a plugin is a function without arguments that
registers records, and it is named the same way. An installed package names its plugin as an entry
point of the group `echelon.plugins`. Ranks load what the process that starts them has loaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Protocol, TypeVar

ENTRY_POINTS = "echelon.plugins"


class Named(Protocol):
    """Describe what a registry holds: anything with a name, here and in other tools."""

    @property
    def name(self) -> str:
        """Return the name that users write."""
        ...

    @property
    def tool_names(self) -> Mapping[str, str]:
        """Return its names in other tools, by the names of the tools."""
        ...


Record = TypeVar("Record", bound=Named)


class Registry(Mapping[str, Record]):
    """Map names to records, in the order in which they were registered.

    `Annotated[str, REGISTRY]` says of a field that its value is one of these names.
    """

    def __init__(self, choice: str, records: Iterable[Record]) -> None:
        """Hold our own records of `choice`, such as "schedule"."""
        self.choice = choice
        self._records = {record.name: record for record in records}

    def __getitem__(self, name: str) -> Record:
        """Return the record of this name."""
        return self._records[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._records)

    def __len__(self) -> int:
        """Return how many records there are."""
        return len(self._records)

    def of_tool(self, tool: str) -> dict[str, str]:
        """Return the names of records by the names that `tool` has for them."""
        return {
            record.tool_names[tool]: name
            for name, record in self.items()
            if tool in record.tool_names
        }

    def register(self, record: Record) -> None:
        """Add the record of a plugin; ValueError where its name is taken."""
        if record.name in self._records:
            raise ValueError(f"there is a {self.choice} {record.name!r} already")
        self._records[record.name] = record
        _ADDED.append((self, record.name))

    def remove(self, name: str) -> None:
        """Forget a record of a plugin."""
        del self._records[name]


_ADDED: list[tuple[Registry[Any], str]] = []
_LOADED: dict[str, list[tuple[Registry[Any], str]]] = {}


@cache
def load_reference(reference: str) -> Any:
    """Return what "package.module:name" names."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def loaded_plugins() -> tuple[str, ...]:
    """Return the plugins that are loaded, in order."""
    return tuple(_LOADED)


def load_plugins(references: Iterable[str]) -> None:
    """Load these plugins, each once."""
    for reference in references:
        if reference not in _LOADED:
            start = len(_ADDED)
            load_reference(reference)()
            _LOADED[reference] = _ADDED[start:]


def use_plugins(references: Iterable[str]) -> None:
    """Load these plugins, and forget what others have registered."""
    wanted = tuple(references)
    for other in [one for one in _LOADED if one not in wanted]:
        for registry, name in _LOADED.pop(other):
            registry.remove(name)
    load_plugins(wanted)


def load_installed_plugins() -> None:
    """Load the plugins of installed packages, each once."""
    load_plugins(_installed_plugins())


@cache
def _installed_plugins() -> tuple[str, ...]:
    return tuple(point.value for point in entry_points(group=ENTRY_POINTS))
