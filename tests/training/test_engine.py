"""Steps of the engine equal those of one device, whatever the layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.core.plan import Optimizer, Plan, Recompute, Zero
from echelon.launch.local.supervisor import RankPool
from echelon.models.batch import TokenBatch
from echelon.schedule.build import build_schedule
from echelon.schedule.from_plan import forward_only
from echelon.training.steps.part import StepResult
from tests.parallel import targets
from tests.parallel.layouts import ADAMW, GPT2, NANO, QWEN, plan_of
from tests.parallel.one_device import assemble, decoder, make_rows, train
from tests.parallel.targets import Trained
from tests.training import engine_targets
from tests.training.engine_targets import Poisoned

FULL = Recompute(policy="full")
PLANS = {
    "one device": plan_of(model=QWEN),
    "dp2, three microbatches": plan_of(dp=2, model=QWEN, microbatches=3),
    "dp3, learned positions": plan_of(dp=3, model=GPT2, microbatches=1, microbatch_sequences=2),
    "tp2 scattered": plan_of(tp=2, model=GPT2, sequence_parallel=True),
    "tp2, recompute": plan_of(tp=2, model=QWEN, recompute=FULL),
    "pp2 1f1b": plan_of(pp=2, model=QWEN, microbatches=3),
    "pp4 naive, uneven": plan_of(
        pp=4, schedule="naive", model=replace(NANO, layers=5), microbatches=4
    ),
    "dp2 x pp2 gpipe": plan_of(dp=2, pp=2, model=GPT2, schedule="gpipe"),
    "pp2 x tp2 scattered": plan_of(
        pp=2, tp=2, model=QWEN, sequence_parallel=True, microbatch_sequences=2
    ),
    "dp2 x tp2, dropout": plan_of(
        dp=2, tp=2, model=replace(QWEN, dropout=0.3), sequence_parallel=True
    ),
    "dp2 x pp2 x tp2": plan_of(
        dp=2, pp=2, tp=2, model=replace(GPT2, layers=2), sequence_parallel=True
    ),
    "no clipping": plan_of(dp=2, optimizer=replace(ADAMW, clip_norm=None)),
    "norm below the limit": plan_of(dp=2, optimizer=replace(ADAMW, clip_norm=1e6)),
}
SLICES = Zero(stage=3, accumulate="slices")
PLANS |= {
    "stage 1, shard2": plan_of(dp_shard=2, model=QWEN, zero=Zero(stage=1), microbatches=3),
    "stage 2, shard4": plan_of(dp_shard=4, model=GPT2, zero=Zero(stage=2, accumulate="slices")),
    "stage 2, replicate2 x shard2, whole sums": plan_of(
        dp=2, dp_shard=2, model=QWEN, zero=Zero(stage=2, accumulate="whole"), microbatches=3
    ),
    "stage 3, shard2": plan_of(dp_shard=2, model=NANO, zero=SLICES, microbatches=3),
    "stage 3, shard3, recompute": plan_of(dp_shard=3, model=GPT2, zero=SLICES, recompute=FULL),
    "stage 3, replicate2 x shard2, once a step": plan_of(
        dp=2, dp_shard=2, model=QWEN, zero=replace(SLICES, reshard_after_forward=False)
    ),
    "stage 3, tp2 scattered": plan_of(
        dp_shard=2, tp=2, model=QWEN, zero=SLICES, sequence_parallel=True, recompute=FULL
    ),
    "stage 3, pp2 gpipe, pairs of blocks": plan_of(
        dp_shard=2, pp=2, model=QWEN, schedule="gpipe", zero=replace(SLICES, unit_blocks=2)
    ),
    "stage 3, pp2 1f1b x tp2, small ones whole": plan_of(
        dp_shard=2,
        pp=2,
        tp=2,
        model=GPT2,
        microbatches=3,
        zero=replace(SLICES, keep_whole_below=100, prefetch=2),
    ),
}


@pytest.mark.system("S01", "S04", "S39", "S40", "S41")
@pytest.mark.one_in(16)
@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
def test_three_steps_equal_those_of_one_device(rank_pool: RankPool, plan: Plan) -> None:
    ranks: list[Trained] = rank_pool.run(targets.train, (plan, 3), world_size=plan.mesh.world_size)
    for index, expected in enumerate(train(plan, 3)):
        for rank in ranks:
            assert rank.losses[index] == pytest.approx(expected.loss, rel=1e-12)
            assert rank.norms[index] == pytest.approx(expected.grad_norm, rel=1e-11)
            assert rank.tokens[index] == expected.tokens
        got = assemble(plan, [rank.gradients[index] for rank in ranks])
        for name, gradient in expected.gradients.items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-9, atol=1e-13, msg=name)
        if index == 2:
            got = assemble(plan, [rank.parameters for rank in ranks])
            for name, value in expected.after.items():
                torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.system("S41")
def test_these_steps_are_clipped() -> None:
    norms = [step.grad_norm for step in train(PLANS["one device"], 3)]
    assert all(norm > 0.5 for norm in norms)


def test_single_precision_differs_by_rounding_only(rank_pool: RankPool) -> None:
    plan = plan_of(dp=2, tp=2, dtype="fp32", model=QWEN, sequence_parallel=True)
    ranks: list[Trained] = rank_pool.run(targets.train, (plan, 2), world_size=4)
    exact = train(plan_of(dp=2, tp=2, model=QWEN, sequence_parallel=True), 2)
    got = assemble(plan, [rank.parameters for rank in ranks])
    assert ranks[0].losses == pytest.approx([step.loss for step in exact], rel=1e-5)
    for name, value in exact[-1].after.items():
        assert got[name].dtype == torch.float32
        torch.testing.assert_close(got[name].double(), value, rtol=1e-3, atol=2e-6, msg=name)


def test_norms_and_biases_are_equal_on_all_tensor_ranks(rank_pool: RankPool) -> None:
    plan = plan_of(tp=2, model=GPT2, sequence_parallel=True, dtype="fp32")
    one, other = rank_pool.run(targets.train, (plan, 3), world_size=2)
    whole = [n for n, s in one.parameters.items() if s[0].tensor.shape == s[0].global_shape]
    assert {"layers.0.attention.o.bias", "norm.weight", "positions.weight"} <= set(whole)
    for name in whole:
        assert torch.equal(one.parameters[name][0].tensor, other.parameters[name][0].tensor)


@pytest.mark.one_in(2)
@pytest.mark.system("S43")
@pytest.mark.parametrize(("where", "culprit"), [("loss", 3), ("gradient", 0)])
@pytest.mark.parametrize("layout", [{"dp": 4}, {"dp": 2, "pp": 2}], ids=["dp4", "dp2 x pp2"])
def test_a_step_that_is_not_finite_leaves_everything_alone(
    rank_pool: RankPool, where: str, culprit: int, layout: dict[str, Any]
) -> None:
    plan = plan_of(**layout)
    ranks: list[Poisoned] = rank_pool.run(
        engine_targets.poison, (plan, where, culprit), world_size=4
    )
    for rank in ranks:
        assert [result.finite for result in rank.results] == [True, False, True]
        for name, shards in rank.before.items():
            assert torch.equal(shards[0].tensor, rank.after[name][0].tensor)
        for one, other in zip(*rank.moments, strict=True):
            assert torch.equal(one, other)
            assert one.any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_finite(value: float) -> None:
    good = StepResult(
        step=1,
        loss=1.0,
        tokens=3,
        grad_norm=2.0,
        learning_rate=0.1,
        loss_scale=1.0,
        skipped=False,
        stop_requests=0,
        rank_waits_s=(0.0,),
        rank_used_bytes=(0,),
        routing=None,
        loads={},
        microbatch_losses={},
    )
    assert good.finite
    assert not replace(good, loss=value).finite
    assert not replace(good, grad_norm=value).finite


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(dp=2, tp=2, model=replace(QWEN, dropout=0.4), sequence_parallel=True),
        plan_of(pp=2, dp=2, model=GPT2, microbatches=4, recompute=FULL),
        plan_of(pp=4, schedule="gpipe"),
    ],
    ids=["dp2 x tp2, dropout", "dp2 x pp2", "pp4"],
)
def test_evaluation_is_the_loss_of_one_device_without_dropout(
    rank_pool: RankPool, plan: Plan
) -> None:
    ranks = rank_pool.run(engine_targets.evaluate, plan, world_size=plan.mesh.world_size)
    model = decoder(plan)
    whole = replace(make_rows(plan, 0).batch(0), train=False)
    expected = float(model(None, whole).detach()) / whole.num_valid()
    half = [half_rows(plan, rank) for rank in range(plan.mesh.dp)]
    total = sum(float(model(None, one).detach()) for one in half)
    count = sum(one.num_valid() for one in half)
    for loss, loss_of_half, _ in ranks:
        assert loss == pytest.approx(expected, rel=1e-12)
        assert loss_of_half == pytest.approx(total / count, rel=1e-12)
    got = assemble(plan, [parameters for _, _, parameters in ranks])
    for name, value in model.named_parameters():
        assert torch.equal(got[name], value), f"evaluation changed {name}"


def half_rows(plan: Plan, data_rank: int) -> TokenBatch:
    """Return the rows of the first half of a data rank's microbatches of step 1."""
    rows = make_rows(plan, 1)
    share = plan.mathematics.global_sequences // plan.mesh.dp
    part = slice(data_rank * share, data_rank * share + share // 2)
    half = replace(
        rows,
        sample_ids=rows.sample_ids[part],
        inputs_BT=rows.inputs_BT[part],
        labels_BT=rows.labels_BT[part],
    )
    return replace(half.batch(1), train=False)


@pytest.mark.parametrize("asking", [(), (2,), (0, 3)])
def test_all_ranks_learn_who_asked_to_stop(rank_pool: RankPool, asking: tuple[int, ...]) -> None:
    plan = plan_of(pp=2, tp=2)
    answers = rank_pool.run(engine_targets.ask_to_stop, (plan, asking), world_size=4)
    assert answers == [[0, len(asking)]] * 4


def test_each_microbatch_is_reported_once_by_the_last_stage(rank_pool: RankPool) -> None:
    plan = plan_of(pp=2, dp=2, microbatches=3)
    results = rank_pool.run(engine_targets.microbatch_losses, plan, world_size=4)
    keys = [sorted(result.microbatch_losses) for result in results]
    assert keys == [[], [], [(0, 0), (0, 1), (0, 2)], [(1, 0), (1, 1), (1, 2)]]
    model, rows = decoder(plan), make_rows(plan, 0)
    for data_rank, result in enumerate(results[2:]):
        for (_, microbatch), (loss, tokens) in result.microbatch_losses.items():
            row = slice(data_rank * 3 + microbatch, data_rank * 3 + microbatch + 1)
            alone = TokenBatch.from_rows(
                rows.inputs_BT[row], rows.labels_BT[row], torch.tensor(rows.sample_ids[row])
            )
            assert tokens == alone.num_valid()
            assert loss == pytest.approx(float(model(None, alone).detach()), rel=1e-12)


@pytest.mark.system("S04")
def test_the_loss_is_no_mean_of_means(rank_pool: RankPool) -> None:
    plan = plan_of(dp=2, microbatches=3)
    results = rank_pool.run(engine_targets.microbatch_losses, plan, world_size=2)
    parts = [part for result in results for part in result.microbatch_losses.values()]
    exact = sum(loss for loss, _ in parts) / sum(tokens for _, tokens in parts)
    means = sum(loss / tokens for loss, tokens in parts) / len(parts)
    assert results[0].loss == results[1].loss == pytest.approx(exact, rel=1e-12)
    assert abs(means - exact) > 1e-4 * exact


@pytest.mark.system("S04")
def test_one_sample_against_three_is_the_mean_of_all_four(rank_pool: RankPool) -> None:
    plan = plan_of(dp=2, microbatches=3, model=QWEN)
    results = rank_pool.run(engine_targets.one_against_three, plan, world_size=2)
    rows = engine_targets.without_two(make_rows(plan, 0))
    model, batch = decoder(plan), rows.batch(0)
    loss = model(None, batch) / batch.num_valid()
    loss.backward()
    counted = [
        [count for _, count in result.microbatch_losses.values() if count] for result, _ in results
    ]
    assert [len(samples) for samples in counted] == [1, 3]
    for result, _ in results:
        assert result.loss == pytest.approx(float(loss.detach()), rel=1e-12)
        assert result.tokens == batch.num_valid()
    got = assemble(plan, [gradients for _, gradients in results])
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-9, atol=1e-13, msg=name)
    # The mean of the two ranks' means is another number.
    means = [
        sum(part for part, _ in result.microbatch_losses.values()) / sum(samples)
        for (result, _), samples in zip(results, counted, strict=True)
    ]
    assert abs(sum(means) / 2 - float(loss.detach())) > 1e-4


def test_an_evaluation_runs_forward_only() -> None:
    planned = build_schedule("1f1b", num_stages=2, num_ranks=2, num_microbatches=4)
    only = forward_only(planned, 3)
    assert [[str(action) for action in row] for row in only.actions] == [
        ["F0.0", "F0.1", "F0.2"],
        ["F1.0", "F1.1", "F1.2"],
    ]
    assert (only.num_microbatches, only.stage_ranks) == (3, (0, 1))


def test_a_step_without_counted_tokens_changes_nothing_but_decay(rank_pool: RankPool) -> None:
    plan = plan_of(optimizer=Optimizer(weight_decay=0.0, total_steps=3))
    before, after, loss, norm = rank_pool.run(engine_targets.no_tokens, plan)[0]
    assert (loss, norm) == (0.0, 0.0)
    for name, shards in before.items():
        assert torch.equal(shards[0].tensor, after[name][0].tensor)


def test_files_are_closed_where_a_gather_never_ends(rank_pool: RankPool, tmp_path: Path) -> None:
    zero = replace(
        SLICES, optimizer_offload="nvme", parameter_offload="nvme", offload_dir=str(tmp_path)
    )
    plan = plan_of(dp_shard=2, zero=zero)
    said = rank_pool.run(engine_targets.close_without_a_peer, plan, world_size=2)
    assert said == [["closed", "closed"]] * 2
