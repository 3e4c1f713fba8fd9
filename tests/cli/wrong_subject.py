"""An engine that is wrong on purpose: it says twice the gradients that it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.parallel.storage.weights import Shard
from echelon.training.subject import EngineSubject


class DoubledGradients(EngineSubject):
    """Run the engine, and double what it says of its gradients."""

    def gradients(self) -> Mapping[str, Sequence[Shard]]:
        """Return the gradients of the last step, twice as large."""
        return {
            name: [replace(shard, tensor=2 * shard.tensor) for shard in shards]
            for name, shards in super().gradients().items()
        }


def build(place: RankContext, plan: Plan) -> DoubledGradients:
    """Return the engine of one rank."""
    return DoubledGradients(plan, place)
