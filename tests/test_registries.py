"""A schedule, an optimizer, a context kind, a step part: each is one record, and is proven."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from echelon.config.rules.finders import plan_problems
from echelon.core.choices.context_kinds import CONTEXT_KINDS, ContextKindRecord
from echelon.core.choices.optimizers import OPTIMIZERS, OptimizerRecord
from echelon.core.choices.step_parts import STEP_PARTS, StepPartRecord
from echelon.core.plan import Documents, Optimizer, Plan
from echelon.launch.local.supervisor import RankPool
from echelon.parallel.context.ring import RingAttention
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.storage.weights import bucket_shards
from echelon.proof.oracle.optimizers import OptimizerState, TensorUpdate
from echelon.proof.run import prove
from echelon.proof.verdict import Proof
from echelon.schedule.action import Action, ActionKind
from echelon.schedule.build import SCHEDULES
from echelon.schedule.builders.builder import EQUAL_TIMES, ActionTimes, Builder
from echelon.training.optimizer.trained_ranges import FusedOperands
from echelon.training.steps.part import ShardsByKind, StepPart, StepPlace
from tests.core.choices.loaded import plugins
from tests.proof.layouts import layout


class LastInFirstOut(Builder):
    """Run all forward passes, then the backward passes from the last microbatch to the first."""

    __slots__ = ()

    name: ClassVar[str] = "toy-lifo"
    paper: ClassVar[str] = "a toy"

    @classmethod
    def minimum_microbatches(cls, num_ranks: int) -> int:
        """Return 1."""
        return 1

    def rank_actions(self, rank: int) -> tuple[Action, ...]:
        """Return F of all microbatches, then BW in the opposite order."""
        numbers = range(self.num_microbatches)
        forward = [Action(ActionKind.F, rank, number) for number in numbers]
        backward = [Action(ActionKind.BW, rank, number) for number in reversed(numbers)]
        return (*forward, *backward)

    def idle_s(self, times: ActionTimes = EQUAL_TIMES) -> float:
        """Return (p-1)(F+BW)."""
        return (self.num_ranks - 1) * times.total_s

    def peak_in_flight(self, stage: int) -> int:
        """Return m."""
        return self.num_microbatches


def toy_schedule() -> None:
    """Register the schedule, as a plugin does."""
    SCHEDULES.register(LastInFirstOut)


class MeanOfValues(StepPart):
    """Keep the running mean of the values that the optimizer updates, slice by slice."""

    def __init__(self, place: StepPlace) -> None:
        """Begin with the initial values."""
        self._groups, self._buckets = place.groups, place.model.trained
        self._values = {
            one.name: place.masters.get(one.name, one.value_slice) for one in self._buckets
        }
        self._means = {name: values.clone() for name, values in self._values.items()}

    def after_update(self, step: int, *, skipped: bool) -> Sequence[Bucket]:
        """Move the means."""
        for name, mean in self._means.items():
            mean.lerp_(self._values[name], 0.5)
        return ()

    def tensors(self) -> ShardsByKind:
        """Return the means, which a checkpoint keeps."""
        means = [self._means[bucket.name] for bucket in self._buckets]
        return {"toy.mean": bucket_shards(self._buckets, means, self._groups)}

    def proven(self) -> ShardsByKind:
        """Return the means."""
        return self.tensors()


def means_of_values(
    plan: Plan, values: Sequence[Mapping[str, torch.Tensor]]
) -> Mapping[str, Mapping[str, torch.Tensor]]:
    """Return the same means, as the reference has them."""
    means = {name: value.clone() for name, value in values[0].items()}
    for after in values[1:]:
        means = {name: torch.lerp(mean, after[name], 0.5) for name, mean in means.items()}
    return {"toy.mean": means}


def wrong_means(
    plan: Plan, values: Sequence[Mapping[str, torch.Tensor]]
) -> Mapping[str, Mapping[str, torch.Tensor]]:
    """Return means that leave the first step out."""
    return means_of_values(plan, values[1:])


def toy_step_part() -> None:
    """Register the mean of values as a part of every step."""
    STEP_PARTS.register(
        StepPartRecord(
            name="toy-mean-of-values",
            part=f"{__name__}:MeanOfValues",
            oracle=f"{__name__}:means_of_values",
        )
    )


def toy_wrong_part() -> None:
    """Register it with a reference that disagrees."""
    STEP_PARTS.register(
        StepPartRecord(
            name="toy-mean-of-values",
            part=f"{__name__}:MeanOfValues",
            oracle=f"{__name__}:wrong_means",
        )
    )


class AveragedGradient:
    """Step by the running mean of the gradients; the weight decay is decoupled."""

    def __init__(self, settings: Optimizer) -> None:
        """Take the momentum of `settings`."""
        self._keep = settings.momentum

    def start_update(self, count: int) -> None:
        """Ignore the number of the update."""

    def update(self, operands: FusedOperands) -> None:
        """Update the targets and the means."""
        (means,) = operands.state
        for target, gradient, mean in zip(operands.targets, operands.gradients, means, strict=True):
            mean.lerp_(gradient, 1 - self._keep)
            target.mul_(1 - operands.rate * operands.weight_decay)
            target.sub_(mean, alpha=operands.rate)


def averaged_gradient(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: OptimizerState,
    optimizer: Optimizer,
    *,
    rate: float,
    decay: float,
) -> TensorUpdate:
    """Return the same update of a whole tensor, as the oracle wants it."""
    mean = state.advance("mean", optimizer.momentum, 1 - optimizer.momentum, gradient)
    return TensorUpdate(main=-rate * mean, decay=-rate * decay * parameter)


def toy_optimizer() -> None:
    """Register the optimizer."""
    OPTIMIZERS.register(
        OptimizerRecord(
            name="toy-mean",
            title="Toy",
            paper="a toy",
            state=("mean",),
            settings=("momentum",),
            runner=f"{__name__}:AveragedGradient",
            oracle=f"{__name__}:averaged_gradient",
            is_scale_free=False,
        )
    )


def toy_context_kind() -> None:
    """Register a ring whose places hold one chunk each, in their order."""
    CONTEXT_KINDS.register(
        ContextKindRecord(
            name="toy-chunks",
            facts=replace(
                CONTEXT_KINDS["ring"].facts,
                splits="positions: place i has chunk i",
                divides="cp | T",
            ),
            placement="contiguous",
            runner=f"{__name__}:ChunkAttention",
        )
    )


class ChunkAttention(RingAttention):
    """Go around the ring, as a class of its own."""


SCHEDULE = f"{__name__}:toy_schedule"
CONTEXT_KIND = f"{__name__}:toy_context_kind"
OPTIMIZER = f"{__name__}:toy_optimizer"
STEP_PART = f"{__name__}:toy_step_part"
WRONG_PART = f"{__name__}:toy_wrong_part"


def require_proven(proof: Proof) -> None:
    """Fail with what the proof says where it does not hold."""
    proof.require()
    assert all(claim.compared > 0 for one in proof.passes for claim in one.claims)


def test_a_schedule_from_a_plugin_is_proven(rank_pool: RankPool) -> None:
    with plugins(SCHEDULE):
        plan = layout(pp=2, schedule=LastInFirstOut.name)
        require_proven(prove(plan, run_ranks=rank_pool.run, own_precision=False))


def test_an_optimizer_from_a_plugin_is_proven(rank_pool: RankPool) -> None:
    with plugins(OPTIMIZER):
        plan = layout(dp=2, zero={"stage": 2}, optimizer={"kind": "toy-mean"})
        require_proven(prove(plan, run_ranks=rank_pool.run))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_step_part_from_a_plugin_is_proven(rank_pool: RankPool, stage: int) -> None:
    with plugins(STEP_PART):
        plan = layout(dp=2, zero={"stage": stage})
        require_proven(prove(plan, run_ranks=rank_pool.run, own_precision=False))


def test_a_step_part_that_keeps_other_values_than_its_reference_fails(rank_pool: RankPool) -> None:
    with plugins(WRONG_PART):
        proof = prove(layout(dp=2), run_ranks=rank_pool.run, own_precision=False)
    failed = [claim for one in proof.passes for claim in one.claims if claim.failures]
    assert [claim.rule.id for claim in failed] == ["prove-parameters"]
    assert {failure.detail for failure in failed[0].failures} == {"toy.mean"}


@pytest.mark.parametrize("documents", ["joined", "separate"])
def test_a_context_kind_from_a_plugin_is_proven(rank_pool: RankPool, documents: Documents) -> None:
    with plugins(CONTEXT_KIND):
        context = {"kind": "toy-chunks"}
        plan = layout(mesh={"cp": 2}, context=context, documents=documents)
        require_proven(prove(plan, run_ranks=rank_pool.run, own_precision=False))


@pytest.mark.parametrize(
    ("length", "kind", "fits"),
    [(66, "ring", False), (66, "toy-chunks", True), (67, "toy-chunks", False)],
)
def test_the_rules_follow_from_the_facts_of_a_context_kind(
    length: int, kind: str, fits: bool
) -> None:
    with plugins(CONTEXT_KIND):
        plan = layout(mesh={"cp": 2}, context={"kind": kind})
        mathematics = replace(plan.mathematics, sequence_length=length)
        found = list(plan_problems(replace(plan, mathematics=mathematics)))
    assert [one.rule for one in found] == ([] if fits else ["context-divides-sequence"])


def test_a_plan_with_an_optimizer_that_nobody_has_registered_is_refused() -> None:
    with plugins(OPTIMIZER):
        text = layout(optimizer={"kind": "toy-mean"}).to_json()
        assert Plan.from_json(text).mathematics.optimizer.kind == "toy-mean"
    with pytest.raises(ValueError, match="'toy-mean' is none of"):
        Plan.from_json(text)
    with pytest.raises(ValueError, match="kind: \\['toy-mean'\\] is none of"):
        Plan.from_json(text.replace('"toy-mean"', '["toy-mean"]'))


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Return a folder with an installed package that names the toy schedule as its plugin."""
    metadata = tmp_path / "toys-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[echelon.plugins]\ntoys = {SCHEDULE}\n")
    return tmp_path


def test_an_installed_plugin_is_in_every_list(installed: Path) -> None:
    root = Path(__file__).resolve().parent.parent
    paths = [str(installed), str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    words = ("--set", "pipeline.schedule=toy-lifo")
    done = subprocess.run(
        [sys.executable, "-m", "echelon", *["config", "show", "nano"], *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert done.returncode == 0, done.stderr
    assert "toy-lifo" in done.stdout
