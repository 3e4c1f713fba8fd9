"""What a rank says of its experts in one step: where tokens went, loads, losses, biases.

The prover reads attributes only: any object with those of a `RoutingSaid` is one.

Shape suffixes: n tokens that a rank routed, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSaid:
    """Say where one layer sent the rows of a microbatch that one rank routed.

    `tokens` has n numbers (sample id x sequence length + position), `chosen` [n, K] the experts of
    each, `kept` [n, K] whether they had room.
    """

    layer: int
    microbatch: int
    tokens: Sequence[int]
    chosen: Sequence[Sequence[int]]
    kept: Sequence[Sequence[bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSaid:
    """Say how a layer routed the global batch: assignments by expert (before drops), losses."""

    counts: Sequence[int]
    dropped: int
    aux_loss: float
    z_loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SummarySaid:
    """Sum up the routing of all layers; `imbalance` is that of the worst one."""

    assignments: int
    dropped: int
    aux_loss: float
    z_loss: float
    imbalance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSaid:
    """Hold all that a rank says of the routing of a step.

    `routes` are those of its own rows; `loads` those of its layers over the whole global batch;
    `summary` that of the model. `biases` and `shares` (of the loads), [E] by layer, are those that
    the next step begins with.
    """

    routes: Sequence[RouteSaid]
    loads: Mapping[int, LoadSaid]
    summary: SummarySaid
    biases: Mapping[int, Sequence[float]]
    shares: Mapping[int, Sequence[float]]

    @classmethod
    def of(cls, said: Any) -> RoutingSaid | None:
        """Return a copy of what a report says; nothing where it says nothing."""
        if said is None:
            return None
        return cls(
            routes=[
                RouteSaid(
                    layer=int(one.layer),
                    microbatch=int(one.microbatch),
                    tokens=[int(token) for token in one.tokens],
                    chosen=[[int(expert) for expert in row] for row in one.chosen],
                    kept=[[bool(kept) for kept in row] for row in one.kept],
                )
                for one in said.routes
            ],
            loads={
                int(layer): LoadSaid(
                    counts=[int(count) for count in load.counts],
                    dropped=int(load.dropped),
                    aux_loss=float(load.aux_loss),
                    z_loss=float(load.z_loss),
                )
                for layer, load in said.loads.items()
            },
            summary=SummarySaid(
                assignments=int(said.summary.assignments),
                dropped=int(said.summary.dropped),
                aux_loss=float(said.summary.aux_loss),
                z_loss=float(said.summary.z_loss),
                imbalance=float(said.summary.imbalance),
            ),
            biases=_vectors(said.biases),
            shares=_vectors(said.shares),
        )

    @classmethod
    def from_json(cls, table: Mapping[str, Any] | None) -> RoutingSaid | None:
        """Return what was written with `dataclasses.asdict` as JSON."""
        if table is None:
            return None
        return cls(
            routes=[RouteSaid(**route) for route in table["routes"]],
            loads={int(layer): LoadSaid(**load) for layer, load in table["loads"].items()},
            summary=SummarySaid(**table["summary"]),
            biases=_vectors(table["biases"]),
            shares=_vectors(table["shares"]),
        )


def _vectors(said: Mapping[Any, Sequence[float]]) -> dict[int, list[float]]:
    return {int(layer): [float(one) for one in vector] for layer, vector in said.items()}
