# SPDX-License-Identifier: Apache-2.0
"""The ways to split a run that `echelon compare --strategies` and `ec.strategy` take by name.

Each is one record: the settings that make it of any run, on so many ranks. Axes that a strategy
does not name are 1, so that it is one strategy and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
_DATA_AXES = ("dp_replicate", "dp_shard")


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyRecord:
    """Name one strategy, the axes that have the degree of its ranks, and its other settings."""

    name: str
    """What `--strategies` takes."""
    axes: tuple[str, ...]
    """Axes of the mesh with this degree; experts (`ep`) lie over the ranks of another axis."""
    others: Mapping[str, str]
    """Settings beside the mesh, as a run file has them."""
    servers: int = 0
    """Parameter servers beside the ranks."""
    about: str
    """What it splits."""

    def settings(self, ranks: int) -> tuple[str, ...]:
        """Return the settings that make a run one of this strategy on `ranks` ranks.

        Parameter servers are ranks beside these, which are their workers.
        """
        mesh = {f"mesh.{axis}": ranks if axis in self.axes else 1 for axis in _AXES}
        mesh["servers.count"] = self.servers
        return tuple(f"{key}={value}" for key, value in {**mesh, **self.others}.items())

    def replicas(self, ranks: int) -> int:
        """Return how many of `ranks` ranks see other samples: replicas that are in sync."""
        return ranks if set(self.axes).intersection(_DATA_AXES) else 1


def _record(name: str, axes: str, about: str, **others: str) -> StrategyRecord:
    settings = {key.replace("__", "."): value for key, value in others.items()}
    return StrategyRecord(name=name, axes=tuple(axes.split()), others=settings, about=about)


STRATEGIES: Mapping[str, StrategyRecord] = {
    record.name: record
    for record in (
        _record("dp", "dp_replicate", "samples", zero__stage="0"),
        _record("zero1", "dp_shard", "samples, optimizer state", zero__stage="1"),
        _record("zero2", "dp_shard", "samples, optimizer state, gradients", zero__stage="2"),
        _record("zero3", "dp_shard", "samples, all model state", zero__stage="3"),
        _record("tp", "tp", "heads and columns of each layer", zero__stage="0"),
        _record(
            "sp",
            "tp",
            "heads and columns, tokens between layers",
            zero__stage="0",
            mesh__sequence_parallel="true",
        ),
        _record("pp", "pp", "layers", zero__stage="0"),
        _record("cp", "cp", "positions, keys on a ring", zero__stage="0", context__kind="ring"),
        _record(
            "gathered",
            "cp",
            "positions, keys gathered",
            zero__stage="0",
            context__kind="gathered",
        ),
        _record(
            "ulysses",
            "cp",
            "positions, heads in attention",
            zero__stage="0",
            context__kind="ulysses",
        ),
        _record("ep", "dp_shard ep", "samples, experts", zero__stage="1"),
        StrategyRecord(
            name="parameter-server",
            axes=("dp_replicate",),
            others={"zero.stage": "0"},
            about="samples; model and optimizer state over two servers",
            servers=2,
        ),
    )
}
