"""Plant a bug in the engine of one rank, for the length of one proof."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.parallel.data import GradientReduction, _ReductionGroups
from echelon.parallel.transport.device_mesh import RankGroups
from echelon.parallel.weights import Shard
from echelon.proof.subject import Factory, ProofBatch
from echelon.training.subject import build

Plant = Callable[[pytest.MonkeyPatch, Plan], None]


class MutantSubject:
    """Run an engine with a bug in it; `close` takes the bug out, for ranks live on."""

    def __init__(self, subject: Any, patch: pytest.MonkeyPatch) -> None:
        """Hold the engine and what was changed."""
        self._subject, self._patch = subject, patch

    def step(self, batch: ProofBatch, step: int) -> Any:
        """Take one step."""
        return self._subject.step(batch, step)

    def gradients(self) -> Mapping[str, Sequence[Shard]]:
        """Return the gradients of the last step."""
        return self._subject.gradients()

    def parameters(self) -> Mapping[str, Sequence[Shard]]:
        """Return the parameters."""
        return self._subject.parameters()

    def masters(self) -> Mapping[str, Sequence[Shard]]:
        """Return the values that the optimizer updates."""
        return self._subject.masters()

    def close(self) -> None:
        """Take the bug out, and give back what the engine holds."""
        self._patch.undo()
        self._subject.close()


def mutant(plant: Plant) -> Factory:
    """Return the factory of an engine in which `plant` has changed something."""

    def build_mutant(place: RankContext, plan: Plan) -> MutantSubject:
        patch = pytest.MonkeyPatch()
        try:
            plant(patch, plan)
            return MutantSubject(build(place, plan), patch)
        except BaseException:
            patch.undo()
            raise

    return build_mutant


def change_routes(
    patch: pytest.MonkeyPatch,
    change: Callable[[_ReductionGroups, RankGroups], _ReductionGroups],
    *,
    of: tuple[bool, ...] = (False, True),
) -> None:
    """Sum gradients on changed routes: of routed experts (True), of all others (False), or both."""
    init = GradientReduction.__init__

    def changed(self: GradientReduction, plan: Plan, groups: RankGroups) -> None:
        init(self, plan, groups)
        for expert in of:
            self._groups[expert] = change(self._groups[expert], groups)

    patch.setattr(GradientReduction, "__init__", changed)


def change_hops(
    patch: pytest.MonkeyPatch, change: Callable[[str, Sequence[Any], RankGroups], Sequence[Any]]
) -> None:
    """Sum each kind of bucket over the groups that `change` makes of (kind, hops, groups)."""

    def changed(route: _ReductionGroups, groups: RankGroups) -> _ReductionGroups:
        hops = {kind: change(kind, these, groups) for kind, these in route.next_groups.items()}
        return replace(route, next_groups=hops)

    change_routes(patch, changed)
