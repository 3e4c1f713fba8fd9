"""Plant a bug in the engine of one rank, for the length of one proof.

A mutant is one function, decorated with what the prover must tell of it:

    @mutant(Told("prove-gradients", "head.weight", "2", "dp", plan={"dp": 2}))
    def all_reduce_twice(patch: pytest.MonkeyPatch, plan: Plan) -> None: ...

`tests/proof/mutants/test_*.py` prove a plan for each `Told` of the modules that they name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import pytest

from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.parallel.completion.completion import Completion
from echelon.parallel.data import GradientReduction, _ReductionGroups
from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.storage.weights import Shard
from echelon.proof.subject import ProofBatch
from echelon.training.subject import build
from tests.proof.layouts import layout

LAST = "layers.1"
"""The last block of the plans in which bugs are planted."""

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

    def step_parts(self) -> Any:
        """Return the proven values of the step parts."""
        return self._subject.step_parts()

    def activations(self) -> Any:
        """Return what passed the boundaries of blocks in the last step."""
        return self._subject.activations()

    def applied(self) -> Any:
        """Return what an asynchronous server applied."""
        return self._subject.applied()

    def begin(self, place: RankContext, num_steps: int) -> int:
        """Begin a run that goes on without lost islands."""
        return self._subject.begin(place, num_steps)

    def met(self, step: int) -> Any:
        """Return which islands met."""
        return self._subject.met(step)

    def die_at_meeting(self, step: int) -> None:
        """Have this rank killed in a meeting."""
        self._subject.die_at_meeting(step)

    def wait_for_return(self, step: int, islands: int, limit_s: float) -> None:
        """Let a meeting wait for all islands."""
        self._subject.wait_for_return(step, islands, limit_s)

    def watch_sums(self, see: Any) -> None:
        """Let sums be compared as they are made."""
        self._subject.watch_sums(see)

    def close(self) -> Any:
        """Take the bug out, and give back what the engine holds."""
        self._patch.undo()
        return self._subject.close()


@dataclass(frozen=True, slots=True)
class Told:
    """Say what the prover tells of a planted bug; `of` makes the plan that is proven of `plan`."""

    rule: str
    tensor: str
    factor: str
    axis: str = ""
    step: int = 0
    plan: dict[str, Any] = field(default_factory=dict)
    own_precision: bool = False
    late: bool = False
    of: Callable[..., Plan] = layout


class Mutant:
    """Build an engine with a bug in it: the factory that a proof is given the name of."""

    def __init__(self, plant: Plant, told: tuple[Told, ...] = ()) -> None:
        """Hold what plants the bug, and what must be told of it in each plan."""
        self.plant, self.told = plant, told

    def __call__(
        self, place: RankContext, plan: Plan, completion: Completion | None = None
    ) -> MutantSubject:
        """Return the engine, in which something is changed."""
        patch = pytest.MonkeyPatch()
        try:
            self.plant(patch, plan)
            return MutantSubject(build(place, plan, completion), patch)
        except BaseException:
            patch.undo()
            raise


def mutant(*told: Told) -> Callable[[Plant], Mutant]:
    """Return what makes a mutant of a function; without `told`, its module's test has one."""
    return lambda plant: Mutant(plant, told)


def mutants_of(*modules: ModuleType) -> list[Any]:
    """Return a parameter for each thing to be told of the mutants of `modules`: (subject, told).

    `make test` proves each mutant in its first plan, `make test-all` in all of them.
    """
    return [
        pytest.param(
            f"{module.__name__}:{name}",
            told,
            id=f"{module.__name__.rpartition('.')[2]}:{name}",
            marks=[pytest.mark.slow] if number else [],
        )
        for module in modules
        for name, one in vars(module).items()
        if isinstance(one, Mutant)
        for number, told in enumerate(one.told)
    ]


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
