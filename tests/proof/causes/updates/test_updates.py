"""A wrong update is told by its parts: the rate, the decay, the clip, twice, or not at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from echelon.core.parameters import parameters
from echelon.core.plan import Optimizer, Plan
from echelon.proof.causes.finding import ProofFinding
from echelon.proof.causes.updates.updates import (
    explain_update,
    gradient_behind_adamw,
    stale_versions,
)
from echelon.proof.claims.checks import Check
from echelon.proof.claims.plan_evidence import PlanEvidence
from echelon.proof.evidence.evidence import float64_tolerance
from echelon.proof.observed import ObservedRun
from echelon.proof.oracle.optimizers import OptimizerState, TensorUpdate, update
from echelon.proof.oracle.oracle import OracleStep, run_oracle
from echelon.proof.ranks import ObservedShard, RankResult
from echelon.proof.shrink import shrink
from tests.parallel.servers.test_server import served_plan
from tests.proof.layouts import layout
from tests.proof.replicas import replicas

PLAN = shrink(
    layout(dp=2, accumulation=1, optimizer={"weight_decay": 0.1, "clip_norm": 0.01, "eps": 1e-3}),
    precision="fp64",
)
NAME = "layers.0.mlp.down.weight"

Parts = Callable[[TensorUpdate, OracleStep], torch.Tensor]


def told(parts: Parts, name: str = NAME) -> ProofFinding:
    """Return what is said of a first update that was this one."""
    (oracle,) = run_oracle(PLAN, 1)
    wrong = oracle.before[name] + parts(oracle.updates[name], oracle)

    def shard(piece: ObservedShard) -> torch.Tensor:
        this = (piece.kind, piece.step, piece.name) == ("parameters", 0, name)
        return wrong if this else piece.tensor

    return explain_update(replicas(PLAN, shard=shard), Check(0, name, 1.0))


def again(scale: float) -> Parts:
    """Return the update of gradients that were scaled, in the place of clipped, by `scale`."""

    def parts(_: TensorUpdate, oracle: OracleStep) -> torch.Tensor:
        spec = replicas(PLAN).run.specs[NAME]
        gradient = oracle.gradients[NAME] * (oracle.clip_scale if scale == 0 else scale)
        optimizer, rate = PLAN.mathematics.optimizer, oracle.learning_rate
        value, state = oracle.before[NAME], OptimizerState()
        first = update(spec, value, gradient, state, optimizer, rate).total
        if scale:
            return first
        return first + update(spec, value + first, gradient, state, optimizer, rate).total

    return parts


@pytest.mark.parametrize(
    ("parts", "factor", "says"),
    [
        (lambda one, _: one.total * 2, "dp", "2 times the right update: another learning rate"),
        (lambda one, _: one.main, "weight decay", "weight decay is 0 instead of 0.1"),
        (
            lambda one, _: one.main - one.decay,
            "weight decay",
            "weight decay is -0.1 instead of 0.1",
        ),
        (lambda one, _: one.total * 0, "zero", "not updated at all"),
        (lambda one, _: one.total * float("nan"), "not finite", "not finite"),
        (again(0), "twice", "updated twice in one step"),
        (again(1.0), "clip", "the gradient was not clipped"),
        (
            lambda one, _: one.total.flip(0),
            "none",
            "no cause fits; excluded, with the part that each",
        ),
    ],
    ids=["rate", "no decay", "decay grows", "nothing", "nan", "twice", "not clipped", "other"],
)
def test_a_first_update_is_taken_apart(parts: Parts, factor: str, says: str) -> None:
    finding = told(parts)
    assert says in finding.description
    assert finding.factor == factor


def test_decay_where_none_belongs_is_named() -> None:
    name = "layers.0.attention_norm.weight"
    found = told(lambda one, at: one.total - 0.1 * at.learning_rate * at.before[name], name)
    assert (found.factor, found.value) == ("undue decay", pytest.approx(0.1, rel=1e-6))
    assert found.description.endswith("it is a norm or bias")


def test_the_gradient_behind_a_first_update_of_adamw() -> None:
    optimizer = Optimizer(eps=0.25)
    gradient = torch.tensor([2.0, -0.5, 0.0], dtype=torch.float64)
    step = gradient / (gradient.abs() + 0.25)
    torch.testing.assert_close(gradient_behind_adamw(step, optimizer), gradient)


def shard(rank: int, name: str, values: torch.Tensor, *, primary: bool) -> ObservedShard:
    """Return a whole parameter as a rank gives it."""
    shape = tuple(values.shape)
    return ObservedShard(
        rank=rank,
        kind="parameters",
        step=0,
        name=name,
        global_shape=shape,
        offset=(0,) * len(shape),
        primary=primary,
        tensor=values,
    )


def evidence_of(
    plan: Plan, oracle: OracleStep, *, workers: torch.Tensor, name: str
) -> PlanEvidence:
    """Return what is seen where a server is right, and workers have these values."""
    right = oracle.after[name]
    results = [
        RankResult(rank=0, reports=(), shards=(shard(0, name, workers, primary=True),)),
        RankResult(rank=1, reports=(), shards=(shard(1, name, right, primary=False),)),
    ]
    observed = ObservedRun(plan, results)
    return PlanEvidence(
        plan=plan,
        reference_plan=plan,
        steps=(oracle,),
        run=observed,
        tolerance=float64_tolerance(),
    )


def test_a_stale_version_is_named() -> None:
    """S06: servers have the update, workers the values before."""
    plan = shrink(served_plan(1, 1), precision="fp64")
    (oracle,) = run_oracle(plan, 1)
    name = parameters(plan.model)[0].name

    stale = evidence_of(plan, oracle, workers=oracle.before[name], name=name)
    fresh = evidence_of(plan, oracle, workers=oracle.after[name], name=name)

    (finding,) = stale_versions(stale, oracle, name)
    assert (finding.factor, finding.axis) == ("stale", "servers")
    assert not list(stale_versions(fresh, oracle, name))
