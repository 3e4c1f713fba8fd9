"""Ranks with one sample and with three take the step of all four: the mean is over tokens (S04)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from echelon.core.plan import Plan, Zero
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from echelon.models.batch import TokenBatch
from echelon.training.steps.part import StepResult
from tests.parallel.layouts import QWEN, plan_of
from tests.parallel.one_device import Rows, Values, assemble, decoder, gradient, make_rows
from tests.parallel.targets import Shards, copies
from tests.training.engine_targets import make_engine

SAMPLES = {0: slice(0, 1), 1: slice(1, 4)}
"""The rows of each rank, of four."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A step of a rank, and its reduced gradients before clipping."""

    result: StepResult
    gradients: Shards


def rows_of(plan: Plan, part: slice = slice(None)) -> Rows:
    """Return some of four rows, of which every label is counted."""
    rows = make_rows(plan, 0)
    labels_BT = rows.inputs_BT.roll(-1, dims=1)
    return replace(
        rows,
        sample_ids=rows.sample_ids[part],
        inputs_BT=rows.inputs_BT[part],
        labels_BT=labels_BT[part],
    )


def step_of_some(context: RankContext, plan: Plan) -> Taken:
    """Take a step on this rank's own number of samples."""
    engine = make_engine(context, plan)
    kept: list[Shards] = []
    engine.on_gradients = lambda: kept.append(copies(engine.gradients()))
    batch: TokenBatch = rows_of(plan, SAMPLES[engine.data_rank]).batch(0)
    result = engine.step([batch], 0)
    engine.close()
    return Taken(result=result, gradients=kept[0])


def one_device(plan: Plan, part: slice = slice(None)) -> tuple[float, Values]:
    """Return mean loss and gradients of some rows on one device."""
    model, batch = decoder(plan), rows_of(plan, part).batch(0)
    loss = model(None, batch) / batch.num_valid()
    loss.backward()
    found = {name: gradient(one).clone() for name, one in model.named_parameters()}
    return float(loss.detach()), found


PLANS = {
    "replicas": plan_of(dp=2, model=QWEN, microbatches=1, microbatch_sequences=2),
    "ZeRO 3": plan_of(
        dp_shard=2,
        model=QWEN,
        microbatches=1,
        microbatch_sequences=2,
        zero=Zero(stage=3, accumulate="slices"),
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_one_sample_against_three_is_the_mean_of_all_four(name: str, rank_pool: RankPool) -> None:
    """S04, case 004-08: (g_0 + 3 g_1) / 4 on every rank; a mean of means is (g_0 + g_1) / 2.

    In float64, sums of a few thousand terms in another order agree to 1e-12 of the largest.
    """
    plan = PLANS[name]
    ranks = rank_pool.run(f"{__name__}:step_of_some", plan, 2)
    loss, expected = one_device(plan)
    parts = [one_device(plan, part) for part in SAMPLES.values()]
    found = assemble(plan, [rank.gradients for rank in ranks])
    for rank in ranks:
        assert rank.result.loss == pytest.approx(loss, rel=1e-12)
        assert rank.result.tokens == 4 * plan.mathematics.sequence_length
    assert loss == pytest.approx((parts[0][0] + 3 * parts[1][0]) / 4, rel=1e-12)
    assert abs((parts[0][0] + parts[1][0]) / 2 - loss) > 1e-3
    for key, wanted in expected.items():
        weighted = (parts[0][1][key] + 3 * parts[1][1][key]) / 4
        for one in (found[key], weighted):
            atol = 1e-12 * float(wanted.abs().max())
            torch.testing.assert_close(one, wanted, rtol=1e-10, atol=atol, msg=key)
        of_means = (parts[0][1][key] + parts[1][1][key]) / 2
        assert not torch.allclose(of_means, wanted, rtol=1e-3), key
