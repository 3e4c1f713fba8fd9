"""What trainers of their own code hold: facts of nanotron, norms of heads, the host's memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from echelon.cost.activations.closed_forms import saved_bytes_of_block
from echelon.cost.inputs.cost_inputs import CostInputs, TrainerConstants
from echelon.cost.inputs.pipeline import schedule_index
from echelon.cost.peak.fullest_rank import fullest_rank_bytes
from echelon.cost.seconds.trainers import BY_NAME, NANOTRON
from tests.cost.seconds.small_work import MIXTURE, MODEL, small_work, with_trainer

ALIKE = replace(MODEL, kv_dim=MODEL.query_dim)
BARE = {"working_width": 0.0, "slack": 0.0, "context_bytes": 0.0}


def saved(work: CostInputs, **facts: Any) -> float:
    """Return the bytes that a block keeps beside those that it keeps without these facts."""
    more = saved_bytes_of_block(with_trainer(work, **facts), mixture=False)
    return float(np.asarray(more - saved_bytes_of_block(work, mixture=False)))


def activations(work: CostInputs, **facts: Any) -> float:
    found = fullest_rank_bytes(with_trainer(work, **{**BARE, **facts})).terms["activations"]
    return float(np.asarray(found))


def test_a_joint_projection_stays_only_where_keys_are_as_many_as_queries() -> None:
    tokens, width = float(MODEL.length), float(MODEL.query_dim)
    assert saved(small_work(model=ALIKE), saved_joint=4.0) == pytest.approx(4.0 * tokens * width)
    assert saved(small_work(), saved_joint=4.0) == 0.0


def test_attentions_output_is_turned_where_there_are_several_sequences() -> None:
    one, two = small_work(), small_work(microbatch=2.0)
    assert saved(one, saved_turned=2.0) == 0.0
    assert saved(two, saved_turned=2.0) == pytest.approx(4.0 * float(MODEL.length * MODEL.hidden))


def test_gathered_inputs_wait_whole() -> None:
    """Of attention and of the MLP: h of 2 bytes each, of which a rank has a quarter anyway."""
    cut = small_work(tp=4.0, sequence_parallel=1.0)
    whole = 2.0 * 2.0 * float(MODEL.length * MODEL.hidden) * 0.75
    assert saved(cut, saved_whole=1.0) == pytest.approx(whole)
    assert saved(small_work(tp=4.0), saved_whole=1.0) == 0.0


def test_norms_of_heads_keep_queries_and_keys() -> None:
    normed = small_work(model=replace(MODEL, head_norms=16.0))
    both = float(MODEL.query_dim + MODEL.kv_dim)
    assert saved(normed, saved_normed=1.0) == pytest.approx(2.0 * float(MODEL.length) * both)
    assert saved(small_work(), saved_normed=1.0) == 0.0


def test_what_waits_in_the_hosts_memory_is_not_here() -> None:
    assert activations(small_work(), saved_away=1.0) == 0.0
    assert activations(small_work()) > 0.0


@pytest.mark.parametrize(("pp", "first"), [(1.0, 24), (2.0, 14), (4.0, 7), (8.0, 4)])
def test_stages_share_out_work_with_the_head(pp: float, first: int) -> None:
    """nanotron's llama of 24 blocks, whose head is as much work as 2.45 of them."""
    model = replace(
        ALIKE,
        layers=24.0,
        hidden=2048.0,
        query_dim=2048.0,
        kv_dim=2048.0,
        ffn=4096.0,
        vocab=50257.0,
    )
    order = schedule_index("1f1b")
    work = small_work(model=model, pp=pp, microbatches=2.0 * pp, schedule=order)
    block = float(np.asarray(saved_bytes_of_block(work, mixture=False)))
    kept = activations(work, balances_head=1.0)
    assert kept == pytest.approx(first * pp * block)


def test_facts_of_a_name_are_constants_of_a_trainer() -> None:
    assert BY_NAME["nanotron"].keys() >= NANOTRON.keys()
    for facts in BY_NAME.values():
        replace(TrainerConstants(), **facts)
    assert BY_NAME["gemini"]["gradient_bytes"] == 0.0


def test_workspaces_are_there_whatever_is_trained() -> None:
    work = small_work()
    plain = fullest_rank_bytes(with_trainer(work, **BARE)).terms["buffers"]
    more = fullest_rank_bytes(with_trainer(work, **BARE, workspace_bytes=100.0)).terms["buffers"]
    assert float(np.asarray(more - plain)) == pytest.approx(100.0)
    facts = {**BARE, "grouped_workspace_bytes": 50.0}
    assert fullest_rank_bytes(with_trainer(work, **facts)).terms["buffers"] == plain
    mixture = small_work(model=MIXTURE)
    without = fullest_rank_bytes(with_trainer(mixture, **BARE)).terms["buffers"]
    grouped = fullest_rank_bytes(with_trainer(mixture, **facts)).terms["buffers"]
    assert float(np.asarray(grouped - without)) == pytest.approx(50.0)
