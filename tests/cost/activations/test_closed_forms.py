"""What a block keeps under any trainer: the published closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.config.load import load_job
from echelon.core.errors import ConfigError
from echelon.core.piece_sizes import TRAINING_PIECES
from echelon.core.plan import Plan
from echelon.cost.activations.closed_forms import (
    bytes_of_block,
    gpt_block_bytes,
    loss_kind_bytes,
    saved_bytes_of_block,
)
from echelon.cost.activations.numbers import LOSS_ROWS, OperatorMemory, activation_numbers_from_plan
from echelon.cost.activations.units import block_operators, head_operators
from echelon.cost.seconds.from_plan import cost_inputs_from_plan
from tests.cost.seconds.small_work import MIXTURE, small_work, with_trainer
from tests.walks import examples


def test_sequence_parallelism_shares_out_what_tensor_ranks_leave_whole() -> None:
    sizes = (2048, 8192, 64)
    assert gpt_block_bytes(*sizes) / 1e6 == pytest.approx(1912.6, abs=0.1)
    assert gpt_block_bytes(*sizes, tp=8) / 1e6 == pytest.approx(385.9, abs=0.1)
    both = gpt_block_bytes(*sizes, tp=8, sequence_parallel=True)
    assert both / 1e6 == pytest.approx(239.1, abs=0.1)
    assert both * 8 == gpt_block_bytes(*sizes)


def test_a_trainer_keeps_the_stream_heads_and_inner_values_in_sixteen_bits() -> None:
    work = small_work()
    # N h 8, N (4 query_dim + 4 kv_dim), and N ffn (2 + 2 up).
    dense = 128 * (8 * 64 + 4 * (64 + 32) + 6 * 128)
    assert saved_bytes_of_block(work, mixture=False) == dense
    cut = saved_bytes_of_block(small_work(tp=4.0, sequence_parallel=1.0), mixture=False)
    assert cut == dense / 4
    dropped = with_trainer(work, dropout=1.0, fused_attention=0.0)
    scores = 128 * 8 * 128 * (4 + 1)
    assert saved_bytes_of_block(dropped, mixture=False) == dense + 2 * 128 * 64 + scores


def test_a_mixture_keeps_more_than_the_stream() -> None:
    work = small_work(model=MIXTURE)
    fewer = small_work(model=replace(MIXTURE, top_k=1.0))
    more, less = (saved_bytes_of_block(one, mixture=True) for one in (work, fewer))
    # Each row: itself and its output, gate and up, and what is inside.
    assert more - less == 128 * (2 * 2 * 64 + 2 * 3 * 32)


LEFT_OUT = ("statistics", "statistics of heads", "log-sum-exp")
"""What closed forms leave out of what a block keeps: a few numbers of a row."""

SPLITS = st.fixed_dictionaries(
    {
        "model.preset": st.sampled_from(["llama3-8b", "qwen3-8b", "gpt2-xl", "llama3-70b"]),
        "mesh.tp": st.sampled_from([1, 1, 2, 4]),
        "mesh.cp": st.sampled_from([1, 1, 2, 4]),
        "mesh.pp": st.sampled_from([1, 1, 2]),
        "context.kind": st.sampled_from(["ring", "gathered", "ulysses", "ulysses-ring"]),
        "mesh.sequence_parallel": st.booleans(),
        "pipeline.schedule": st.sampled_from(["1f1b", "zb-h1", "zb-h2", "gpipe"]),
        "batch.sequence_length": st.sampled_from([512, 1024, 4096, 8192]),
        "batch.microbatch_sequences": st.sampled_from([1, 2, 5]),
        "precision.parameters": st.sampled_from(["bf16", "fp32"]),
        "precision.gradients": st.sampled_from(["fp32", "bf16"]),
        "recompute.operators": st.sampled_from(
            [[], ["norm"], ["norm", "activation"], ["norm", "mlp"], ["attention"], ["mlp"]]
        ),
    }
)
"""Random plans; what does not go together the rules refuse."""


def _plan(draws: dict[str, object]) -> Plan | None:
    chosen = dict(draws)
    world = int(str(chosen["mesh.tp"])) * int(str(chosen["mesh.cp"])) * int(str(chosen["mesh.pp"]))
    chosen |= {
        "cluster.preset": f"{world}xh100",
        "batch.global_sequences": 8 * int(str(chosen["batch.microbatch_sequences"])),
        "zero.stage": 0,
        "mesh.dp_shard": 1,
        "recompute.policy": "selective" if chosen["recompute.operators"] else "none",
    }
    for key, axis in (("context.kind", "mesh.cp"), ("pipeline.schedule", "mesh.pp")):
        if chosen[axis] == 1:
            del chosen[key]
    if chosen["mesh.tp"] == 1:
        del chosen["mesh.sequence_parallel"]
    words = [f"{key}={str(value).lower()}" for key, value in chosen.items()]
    try:
        return load_job("llama3-8b-zero3", [word.replace("'", '"') for word in words]).plan
    except ConfigError:
        return None


def _kept(operators: tuple[OperatorMemory, ...]) -> float:
    return sum(
        float(one.bytes)
        for each in operators
        for one in each.saved
        if one.name not in LEFT_OUT and one.operator not in ("attention dropout", "mlp dropout")
    )


@pytest.mark.slow
@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(SPLITS)
def test_closed_forms_of_our_trainer_are_what_its_operators_keep(draws: dict[str, object]) -> None:
    plan = _plan(draws)
    if plan is None:
        return
    work, x = cost_inputs_from_plan(plan), activation_numbers_from_plan(plan)
    whole, redone = bytes_of_block(work, mixture=False)
    closed = float(whole - redone)
    assert closed == pytest.approx(_kept(block_operators(plan, x, 0, (0, 0, None))), rel=1e-9)


@pytest.mark.parametrize("place", ["before", "after", "both"])
@pytest.mark.parametrize("operators", [(), ("norm",), ("norm", "mlp"), ("norm", "activation")])
@pytest.mark.parametrize("tp", [1, 4])
def test_norms_after_branches_are_kept_whatever_is_made_again(
    place: str, operators: tuple[str, ...], tp: int
) -> None:
    words = [
        *(f"cluster.preset={tp}xh100", f"mesh.tp={tp}", "mesh.dp_shard=1", "zero.stage=0"),
        *(f"model.norm_place={place}", "model.qk_norm=true", "model.qk_norm_over=width"),
        f"recompute.policy={'selective' if operators else 'none'}",
        f"recompute.operators={list(operators)}".replace("'", '"'),
        *("batch.global_sequences=8", "batch.microbatch_sequences=1"),
    ]
    plan = load_job("llama3-8b-zero3", words).plan
    work, x = cost_inputs_from_plan(plan), activation_numbers_from_plan(plan)
    whole, redone = bytes_of_block(work, mixture=False)
    closed = float(whole - redone)
    assert closed == pytest.approx(_kept(block_operators(plan, x, 0, (0, 0, None))), rel=1e-9)


@pytest.mark.slow
@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(SPLITS)
def test_closed_forms_of_the_loss_are_those_of_its_operators(draws: dict[str, object]) -> None:
    plan = _plan(draws)
    if plan is None:
        return
    work, x = cost_inputs_from_plan(plan), activation_numbers_from_plan(plan)
    (loss,) = (one for one in head_operators(x) if one.name == "loss")
    exact = loss.backward
    if plan.layout.pipeline.schedule in ("zb-h1", "zb-h2") and plan.mesh.pp > 1:
        waiting = {"zb-h1": plan.mesh.pp, "zb-h2": 2 * plan.mesh.pp - 1}
        others = min(waiting[plan.layout.pipeline.schedule], plan.num_microbatches) - 1
        exact = loss.backward_split + others * loss.weight_gradient_bytes
    assert float(loss_kind_bytes(work).of_layout(work.layout)) == pytest.approx(
        float(exact), rel=1e-9
    )


def test_another_trainer_holds_so_many_bytes_of_each_logit() -> None:
    work = with_trainer(small_work(tp=2.0), logit_held=6.0)
    assert float(loss_kind_bytes(work).of_layout(work.layout)) == 6.0 * 128 * 256 / 2
    assert TRAINING_PIECES.loss_rows == LOSS_ROWS
