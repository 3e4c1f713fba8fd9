"""Seconds of a step: terms that add up, and what each of them depends on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from echelon.cost.bytes.model_sizes import block_weights, embedding_weights, head_weights
from echelon.cost.inputs.pipeline import schedule_index
from echelon.cost.seconds.block import block_seconds, end_seconds
from echelon.cost.seconds.step import (
    fullest_rank_weights,
    message_between_stages,
    step_seconds,
)
from tests.cost.seconds.small_work import MACHINE, MIXTURE, small_work, with_trainer


def test_one_device_computes_its_blocks_and_ends_and_updates() -> None:
    work = small_work(microbatches=3.0)
    found, block, ends = step_seconds(work), block_seconds(work, mixture=False), end_seconds(work)
    every = block.forward.total + block.input_gradients.total + block.weight_gradients
    head = ends.embedding + ends.head_forward + ends.head_backward
    assert found.terms["optimizer"] > 0.0
    quiet = {"bubble", "messages", "tensor", "context", "expert", "recompute", "gather"}
    assert {name for name in quiet if found.terms[name] != 0.0} == set()
    assert found.total - found.terms["optimizer"] == pytest.approx(3 * (8 * every + head))


def test_recomputing_everything_runs_each_block_forward_once_more() -> None:
    once, again = step_seconds(small_work()), step_seconds(small_work(recompute=1.0))
    forward = block_seconds(small_work(), mixture=False).forward.total
    assert again.terms["recompute"] == pytest.approx(8 * forward)
    assert again.total - once.total == pytest.approx(8 * forward)


def test_a_pipeline_waits_and_sends_and_a_shorter_last_stage_has_room_for_the_head() -> None:
    layout: dict[str, Any] = {"pp": 4.0, "microbatches": 8.0, "schedule": schedule_index("1f1b")}
    work = small_work(**layout)
    found, one = step_seconds(work), message_between_stages(work)
    assert found.terms["bubble"] > 0.0
    assert found.terms["messages"] == pytest.approx(one * (2 * 8 + 2 * 3))
    # 7 blocks: three ranks have two, the last has one, and time to spare for the head.
    seven = step_seconds(small_work(model=replace(work.model, layers=7.0), **layout))
    assert seven.terms["head"] < found.terms["head"]
    assert seven.terms["matmul"] == found.terms["matmul"]


def test_messages_of_cut_streams_are_shorter_and_whole_ones_are_joined_again() -> None:
    scattered = small_work(pp=2.0, tp=4.0, sequence_parallel=1.0)
    rows = 2.0 * 128 * 64
    far = pytest.approx(1e-4 + (rows / 4 + 1000) / 5e7)
    assert message_between_stages(scattered) == far
    joined = message_between_stages(small_work(pp=2.0, tp=4.0))
    assert joined == pytest.approx(1e-4 + (rows / 4 + 1000) / 5e7 + 3e-5 + 0.75 * rows / 1e9)


def test_at_stage_two_gradients_travel_for_every_microbatch() -> None:
    cut: dict[str, Any] = {"dp_shard": 4.0, "microbatches": 5.0}
    one, two, three = (step_seconds(small_work(zero=stage, **cut)) for stage in (1.0, 2.0, 3.0))
    assert two.terms["gradients"] == pytest.approx(5 * one.terms["gradients"])
    assert one.terms["gather"] == two.terms["gather"] > 0.0
    assert three.terms["optimizer"] == one.terms["optimizer"]


def test_ranks_whose_times_vary_wait_for_the_slowest() -> None:
    work = with_trainer(small_work(dp_shard=16.0, zero=1.0), spread=0.1)
    found = step_seconds(work)
    busy = sum(found.terms[name] for name in ("matmul", "attention", "memory", "host", "head"))
    assert found.terms["stragglers"] == pytest.approx(0.1 * np.sqrt(2 * np.log(16)) * busy)


def test_cores_that_wait_serve_others() -> None:
    layout: dict[str, Any] = {"pp": 4.0, "microbatches": 4.0, "schedule": schedule_index("1f1b")}
    alone = step_seconds(small_work(**layout))
    shared = step_seconds(small_work(machine=replace(MACHINE, share=0.25), **layout))
    assert shared.terms["matmul"] == alone.terms["matmul"]
    assert shared.terms["bubble"] < alone.terms["bubble"]


def test_the_fullest_rank_has_the_larger_end_or_both() -> None:
    work = small_work(model=MIXTURE, pp=2.0, ep=2.0)
    dense, _ = block_weights(work.model, work.layout, mixture=False)
    own, routed = block_weights(work.model, work.layout, mixture=True)
    held = fullest_rank_weights(work, 1.0, 3.0)
    assert (held.blocks, held.routed) == (dense + 3 * own, 3 * routed)
    ends = embedding_weights(work.model, work.layout), head_weights(work.model, work.layout)
    assert held.ends == max(ends)
    assert fullest_rank_weights(small_work(model=MIXTURE), 1.0, 3.0).ends == sum(ends)
    crossing = replace(work, layout=replace(work.layout, schedule=schedule_index("dualpipe")))
    two = fullest_rank_weights(crossing, 1.0, 3.0)
    assert (two.blocks, two.routed, two.ends) == (2 * held.blocks, 2 * held.routed, sum(ends))
