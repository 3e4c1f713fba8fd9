"""Our engine under proof says of a step what happened, and keeps what the prover asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from echelon.core.attention_mask import PositionRun
from echelon.core.plan import Plan, Precision
from echelon.launch.context import RankContext, RankProgress
from echelon.models.batch import IGNORED_LABEL
from echelon.proof.ranks import find_factory
from echelon.proof.run import OUR_ENGINE
from echelon.training.subject import EngineSubject, build, rank_batches
from tests.parallel.layouts import plan_of
from tests.parallel.one_device import assemble, make_rows, train


def make(plan: Plan) -> EngineSubject:
    context = RankContext(
        rank=0,
        world_size=1,
        device=torch.device("cpu"),
        store=cast("Any", None),
        progress=RankProgress(),
    )
    return build(context, plan)


def test_a_step_is_reported_as_one_device_computes_it() -> None:
    plan = plan_of()
    subject = make(plan)
    for number, right in enumerate(train(plan, 2)):
        rows = make_rows(plan, number)
        report = subject.step(rows, number)
        assert report.loss == pytest.approx(right.loss, rel=1e-13)
        assert report.grad_norm == pytest.approx(right.grad_norm, rel=1e-13)
        assert report.tokens == right.tokens
        assert report.samples == rows.sample_ids
        assert report.layers == (0, 1, 2, 3)
        assert report.actions == ("F0.0", "BW0.0", "F0.1", "BW0.1")
        losses = report.microbatch_losses
        assert list(losses) == [(0, 0), (0, 1)]
        assert sum(count for _, count in losses.values()) == report.tokens
        assert sum(total for total, _ in losses.values()) / report.tokens == pytest.approx(
            report.loss, rel=1e-13
        )
        assert report.bytes_sent == {}
        assert (report.skipped, report.loss_scale, report.routing) == (False, 1.0, None)
        # The gradients are those before they were clipped: the engine's own are smaller by now.
        gradients = assemble(plan, [cast("Any", subject.gradients())])
        torch.testing.assert_close(gradients, right.gradients, rtol=1e-9, atol=1e-12)
        after = assemble(plan, [cast("Any", subject.parameters())])
        torch.testing.assert_close(after, right.after, rtol=1e-9, atol=1e-12)


def test_bytes_are_counted_by_term_and_the_loss_scale_is_divided_out() -> None:
    precision = Precision(
        parameters="fp16",
        gradients="fp16",
        reduction="fp16",
        master="fp32",
        loss_scaling="fixed",
        loss_scale=64.0,
    )
    plan = plan_of(precision=precision)
    subject = make(plan)
    report = subject.step(make_rows(plan, 0), 0)
    assert report.loss_scale == 64.0
    held, size = report.bytes_held, report.bytes_held["parameters"]
    assert held == {
        "parameters": size,
        "gradients": size,
        "master parameters": 2 * size,
        "optimizer state": 4 * size,
    }
    gradients = [shard.tensor for held in subject.gradients().values() for shard in held]
    assert {one.dtype for one in gradients} == {torch.float32}
    squares = sum(float(one.double().square().sum()) for one in gradients)
    assert squares**0.5 == pytest.approx(report.grad_norm, rel=1e-3)
    masters = subject.masters()
    for name, (shard,) in subject.parameters().items():
        assert torch.equal(shard.tensor, masters[name][0].tensor.half())
    subject.close()


def test_a_rank_reads_its_own_rows_and_positions() -> None:
    plan = plan_of(dp_shard=2, microbatches=2, microbatch_sequences=2, documents="separate")
    rows = make_rows(plan, 3)
    assert len(rows.sample_ids) == 8
    for data_rank in (0, 1):
        batches = rank_batches(plan, rows, data_rank, 3)
        samples = [batch.sample_ids_B.tolist() for batch in batches]
        start = 4 * data_rank
        assert samples == [
            list(rows.sample_ids[start : start + 2]),
            list(rows.sample_ids[start + 2 : start + 4]),
        ]
        assert rows.documents is not None
        assert batches[1].documents == rows.documents[start + 2 : start + 4]
    runs = (PositionRun(2, 2, 3),)  # positions 2, 4, 6
    whole = rank_batches(plan, replace(rows, documents=None), 1, 3)[0]
    part = rank_batches(plan, replace(rows, documents=None), 1, 3, runs=runs)[0]
    assert part.positions_T.tolist() == [2, 4, 6]
    labels = rows.labels_BT[4:6][:, [2, 4, 6]]
    assert part.labels_N.view(3, 2).t().tolist() == labels.tolist()
    assert part.num_valid() == int((labels != IGNORED_LABEL).sum()) < whole.num_valid()


def test_the_prover_finds_our_engine() -> None:
    assert cast("object", find_factory(OUR_ENGINE)) is build
