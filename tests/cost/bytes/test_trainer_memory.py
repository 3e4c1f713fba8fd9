"""What other trainers hold, by facts of their code: each fact against arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from echelon.core.plan import Precision
from echelon.cost.activations.closed_forms import saved_bytes_of_block
from echelon.cost.bytes.model_sizes import block_weights, embedding_and_head_weights
from echelon.cost.inputs.cost_inputs import CostInputs, TrainerConstants
from echelon.cost.inputs.numbers import LayoutNumbers
from echelon.cost.inputs.pipeline import schedule_index
from echelon.cost.peak.fullest_rank import fullest_rank_bytes
from echelon.cost.seconds.from_plan import constants_for_precision
from echelon.cost.seconds.trainers import (
    BY_NAME,
    COMPILED_GRAPH,
    EAGER,
    FRAMEWORKS,
    MEMORY,
    NANOTRON,
    OURS,
)
from tests.cost.seconds.small_work import MIXTURE, MODEL, small_work, with_trainer

BARE = {"working_width": 0.0, "slack": 0.0, "context_bytes": 0.0}
"""Constants of a trainer whose memory is what tensors have."""


def terms(work: CostInputs, **constants: Any) -> dict[str, float]:
    """Return the bytes of the fullest rank under a trainer with these constants."""
    found = fullest_rank_bytes(with_trainer(work, **{**BARE, **constants})).terms
    return {name: float(np.asarray(value)) for name, value in found.items()}


def weights(work: CostInputs) -> float:
    """Return the weights of a rank that has all of a dense model."""
    dense, _ = block_weights(work.model, work.layout, mixture=False)
    return float(np.asarray(work.model.layers * dense)) + float(
        np.asarray(embedding_and_head_weights(work.model, work.layout))
    )


def test_our_own_trainer_has_none_of_these_facts() -> None:
    assert OURS not in MEMORY
    ours = FRAMEWORKS[OURS]
    names = {name for facts in MEMORY.values() for name in facts}
    new = names - {"state_bytes", "gradient_bytes", "logit_held", "slack", "context_bytes"}
    new -= {"working_width"}
    assert {getattr(ours, name) for name in new} == {0.0}


def test_parameters_that_rest_in_fp32_are_counted_so() -> None:
    work = small_work(dp_shard=4.0, zero=3.0)
    wide, narrow = terms(work, parameter_bytes=4.0), terms(work)
    assert narrow["parameters"] == pytest.approx(2.0 * weights(work) / 4)
    assert wide["parameters"] == pytest.approx(4.0 * weights(work) / 4)


def test_a_plan_has_no_master_copy_beside_parameters_that_are_it() -> None:
    mixed = Precision(parameters="bf16", gradients="fp32", reduction="fp32", master="fp32")
    sharded = constants_for_precision(FRAMEWORKS["fsdp2"], mixed)
    assert (sharded.parameter_bytes, sharded.state_bytes) == (4.0, 8.0)
    beside = constants_for_precision(FRAMEWORKS["megatron-core"], mixed)
    assert (beside.parameter_bytes, beside.state_bytes) == (0.0, 12.0)


def test_the_loss_and_a_block_are_not_there_at_once() -> None:
    work = small_work(microbatch=2.0, microbatches=4.0)
    both = terms(work, working_width=8.0, loss_apart=0.0)
    apart = terms(work, working_width=8.0, loss_apart=1.0)
    tokens = 2.0 * float(MODEL.length)
    assert both["working"] == pytest.approx(8.0 * tokens * float(MODEL.hidden))
    left = max(0.0, both["working"] - both["logits"])
    assert apart["working"] == pytest.approx(left)


def test_gradients_that_backward_makes_take_the_place_of_activations() -> None:
    """Of one microbatch either is there, of several the sum stays."""
    one, more = small_work(microbatches=1.0), small_work(microbatches=2.0)
    whole = terms(more, late_gradients=1.0)["gradients"]
    assert whole == pytest.approx(4.0 * weights(more))
    found = terms(one, late_gradients=1.0)
    kept, layers = found["activations"], float(MODEL.layers)
    after = whole + kept / layers - kept - found["logits"]
    assert found["gradients"] == pytest.approx(max(0.0, after))
    peak = sum(found.values())
    assert peak >= found["parameters"] + found["optimizer"] + whole


def test_an_update_in_lists_comes_after_backward() -> None:
    work = small_work(microbatches=2.0)
    plain, lists = terms(work), terms(work, update_bytes=1e3)
    passing = plain["activations"] + plain["logits"] + plain["gathered"] + plain["buffers"]
    assert lists["update"] == pytest.approx(1e3 * weights(work) - passing)
    assert terms(small_work(microbatches=2.0, offload=1.0), update_bytes=1e3)["update"] == 0.0


def test_fsdp_gathers_blocks_and_keeps_both_ends() -> None:
    work = small_work(dp_shard=4.0, zero=3.0)
    dense, _ = block_weights(work.model, work.layout, mixture=False)
    ends = embedding_and_head_weights(work.model, work.layout)
    expected = 10.0 * float(np.asarray(dense)) + 2.0 * float(np.asarray(ends))
    assert terms(work, gathered_bytes=10.0)["gathered"] == pytest.approx(expected)
    assert terms(small_work(), gathered_bytes=10.0)["gathered"] == 0.0


def test_the_host_takes_states_gradients_and_parameters() -> None:
    near = terms(small_work(microbatches=2.0))
    states = terms(small_work(microbatches=2.0, offload=1.0))
    assert states["optimizer"] == 0.0
    assert states["gradients"] == near["gradients"]
    gone = terms(small_work(microbatches=2.0, offload=1.0), offloads_gradients=1.0)
    assert gone["gradients"] == 0.0
    away = terms(small_work(microbatches=2.0, parameter_offload=1.0), gathered_bytes=10.0)
    assert away["parameters"] == 0.0
    assert away["gathered"] > 0.0


def test_buckets_hold_gradients_once_more_but_never_more_than_there_are() -> None:
    work = small_work()
    plain = terms(work)["buffers"]
    few = terms(work, bucket_weights=10.0, reduced_bytes=2.0)["buffers"]
    assert few == pytest.approx(plain + 20.0)
    every = terms(work, bucket_weights=1e15, reduced_bytes=2.0)["buffers"]
    assert every == pytest.approx(plain + 2.0 * weights(work))


def test_casts_of_weights_are_there_while_backward_needs_them() -> None:
    facts = {"cast_bytes": 2.0, "late_gradients": 1.0}
    plain, again = small_work(), small_work(recompute=1.0)
    more = terms(plain, **facts)["parameters"] - terms(plain)["parameters"]
    assert more == pytest.approx(2.0 * weights(plain))
    assert terms(again, **facts)["parameters"] == pytest.approx(terms(again)["parameters"])
    copies = terms(again, cast_bytes=2.0)["parameters"] - terms(again)["parameters"]
    assert copies == pytest.approx(2.0 * weights(again))


def test_every_second_product_is_kept() -> None:
    """The input of a block, q, v and attention's output, gate, and the output of down."""
    model = replace(MODEL, up=2.0)
    work = small_work(model=model, per_op=1.0)
    elements = model.hidden + 2.0 * model.query_dim + model.kv_dim + model.ffn + model.hidden
    expected = 2.0 * float(model.length * model.layers * elements)
    assert terms(work)["activations"] == pytest.approx(expected)


def test_eager_blocks_keep_norms_in_fp32_repeated_keys_and_the_activation() -> None:
    work = small_work(model=replace(MODEL, kv_dim=float(MODEL.query_dim) / 4.0))
    names = ("saved_width", "saved_inner", "saved_repeats")
    plain = with_trainer(work, **{name: COMPILED_GRAPH[name] for name in names})
    eager = with_trainer(work, **{name: EAGER[name] for name in names})
    more = saved_bytes_of_block(eager, mixture=False) - saved_bytes_of_block(plain, mixture=False)
    model = work.model
    repeats = 0.75 * model.query_dim
    each = 8.0 * model.hidden + 4.0 * repeats + 2.0 * model.ffn
    assert float(np.asarray(more)) == pytest.approx(float(model.length * each))


def test_the_last_rank_of_interleaved_chunks_begins_all_but_the_last() -> None:
    """It warms up on (v - 1) p chunks and runs one more: p - (p - 1) / v microbatches."""
    model = replace(MODEL, layers=32.0, vocab=1e6)
    layout = LayoutNumbers(
        pp=4.0, virtual=8.0, microbatches=8.0, schedule=schedule_index("interleaved-1f1b")
    )
    work = CostInputs(
        model=model,
        machine=small_work().machine,
        software=small_work().software,
        layout=layout,
    )
    found = terms(work, loss_apart=1.0)
    assert found["logits"] > 0.0
    block = float(np.asarray(saved_bytes_of_block(work, mixture=False)))
    assert found["activations"] == pytest.approx((4.0 - 3.0 / 8.0) * 8.0 * block)


ALIKE = replace(MODEL, kv_dim=MODEL.query_dim)
BARE_STATES = {"working_width": 0.0, "slack": 0.0, "context_bytes": 0.0}


def saved(work: CostInputs, **facts: Any) -> float:
    """Return the bytes that a block keeps beside those that it keeps without these facts."""
    more = saved_bytes_of_block(with_trainer(work, **facts), mixture=False)
    return float(np.asarray(more - saved_bytes_of_block(work, mixture=False)))


def activations(work: CostInputs, **facts: Any) -> float:
    found = fullest_rank_bytes(with_trainer(work, **{**BARE_STATES, **facts})).terms["activations"]
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
    plain = fullest_rank_bytes(with_trainer(work, **BARE_STATES)).terms["buffers"]
    more = fullest_rank_bytes(with_trainer(work, **BARE_STATES, workspace_bytes=100.0)).terms[
        "buffers"
    ]
    assert float(np.asarray(more - plain)) == pytest.approx(100.0)
    facts = {**BARE_STATES, "grouped_workspace_bytes": 50.0}
    assert fullest_rank_bytes(with_trainer(work, **facts)).terms["buffers"] == plain
    mixture = small_work(model=MIXTURE)
    without = fullest_rank_bytes(with_trainer(mixture, **BARE_STATES)).terms["buffers"]
    grouped = fullest_rank_bytes(with_trainer(mixture, **facts)).terms["buffers"]
    assert float(np.asarray(grouped - without)) == pytest.approx(50.0)
