"""Bytes that experts send, by hand for a few rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from echelon.core.experts import Balance, ExpertLayout
from echelon.core.model_shape import Experts
from echelon.core.plan import Plan, Recompute, Zero
from echelon.cost.bytes.sent import bytes_sent
from echelon.launch.local.supervisor import RankPool
from echelon.layout.expert_load import (
    ExpertLoad,
    RowCounts,
    balanced_rows,
    expert_load_from_routing,
)
from echelon.proof.run import prove
from tests.cost.bytes.mixtures import (
    AUX,
    BY_SEQUENCE,
    FOUR,
    PIECES,
    TIGHT,
    TWO_HOPS,
    on_nodes,
    recorded,
    terms,
)
from tests.parallel.layouts import DEEPSEEK, MIXTRAL, plan_of


def test_tensor_ranks_with_whole_experts_gather_outputs() -> None:
    plan = plan_of(model=FOUR, tp=2, ep=2, microbatches=1)
    stream, found = 8 * 16 * 8, terms(plan, 0)
    # Attention sums its output, and its gradient; a mixture has no dense MLP.
    assert found["tp", "blocks forward"] == found["tp", "blocks backward"] == stream
    assert found["tp", "outputs of experts forward"] == stream // 2
    assert found["tp", "outputs of experts backward"] == stream // 2
    assert balanced_rows(plan, 2).leaving == 4


def test_a_scattered_stream_is_dispatched_as_it_is() -> None:
    plan = plan_of(model=FOUR, tp=2, ep=2, microbatches=1, sequence_parallel=True)
    assert not any("experts" in name for axis, name in terms(plan, 0) if axis == "tp")


@pytest.mark.parametrize("scattered", [False, True])
def test_experts_in_pieces_get_the_rows_of_all_tensor_ranks(scattered: bool) -> None:
    plan = plan_of(
        model=FOUR,
        tp=2,
        dp_shard=2,
        ep=2,
        microbatches=1,
        experts=PIECES,
        sequence_parallel=scattered,
    )
    stream, found = 8 * 16 * 8, terms(plan, 0)
    # A sum of all rows costs what gathering and scattering them does.
    assert found["tp", "rows and outputs of experts forward"] == stream
    assert found["tp", "rows and outputs of experts backward"] == stream
    assert found["tp", "choices and gates forward"] == 4 * 2 * (8 + 8)
    assert found["tp", "choices and gates backward"] == 4 * 2 * 8
    assert balanced_rows(plan, 2).leaving == 8


def test_a_shared_expert_is_a_dense_mlp() -> None:
    shared = replace(FOUR, experts=Experts(num_experts=4, top_k=2, ffn=12, shared_experts=1))
    without, beside = (terms(plan_of(model=m, tp=2, ep=2), 0) for m in (FOUR, shared))
    stream = 8 * 16 * 8
    assert beside["tp", "blocks forward"] - without["tp", "blocks forward"] == 2 * stream
    assert beside["tp", "blocks backward"] - without["tp", "blocks backward"] == 2 * stream


def test_what_is_decided_by_sequence() -> None:
    changes: dict[str, Any] = {"model": FOUR, "cp": 2, "tp": 2, "microbatch_sequences": 2}
    changes |= {"microbatches": 1, "dtype": "fp32"}

    def sent(balance: Balance) -> dict[str, int]:
        found = terms(plan_of(**changes, balance=balance), 0)
        return {name: size for (axis, name), size in found.items() if axis == "sequence"}

    assert sent(AUX) == {}
    # Four ranks add up the counts of two sequences, or of the microbatch.
    assert sent(BY_SEQUENCE) == {"counts of sequences": 2 * 3 * (2 * 4 * 8) // 4}
    by_microbatch = replace(AUX, aux_over="microbatch")
    assert sent(by_microbatch) == {"counts of sequences": 2 * 3 * (4 * 8) // 4}
    # Each has 2 x 8 / 4 rows: a key and two choices.
    choices = 3 * 4 * 3 * 8
    assert sent(TIGHT) == {"choices of sequences": choices}
    by_score = replace(TIGHT, drop="score")
    assert sent(by_score) == {
        "choices of sequences": choices,
        "gates of sequences": 3 * 4 * 2 * 4,
    }


def test_a_stage_adds_up_what_its_layers_noted() -> None:
    plan = plan_of(model=DEEPSEEK, dp_shard=2, pp=2, ep=2)
    row = (2 * 8 + 3) * 8
    # The block of the first stage is dense.
    assert ("stage", "routing of a step") not in terms(plan, 0)
    assert terms(plan, 2)["stage", "routing of a step"] == 2 * row // 2
    both = plan_of(
        model=replace(MIXTRAL, layers=4),
        pp=2,
        dp_shard=2,
        ep=2,
        schedule="dualpipe",
        microbatches=4,
    )
    assert terms(both, 0)["pp", "routing of a step"] == 4 * row


def test_a_recorded_load_term_by_term() -> None:
    plan = plan_of(model=FOUR, dp_shard=2, ep=2, microbatches=1, dtype="fp32", sequence_length=4)
    load = recorded(4, [[0, 1], [0, 2], [3, -1], [2, 3]], [[1, 0], [1, 3], [2, 3], [2, 3]])
    # 4 rows leave the first rank and 3 arrive; a row is 16 x 4 bytes, its gate 4.
    assert {name: sent for (axis, name), sent in terms(plan, 0, load).items() if axis == "ep"} == {
        "counts of rows": 2 * 8,
        "dispatch forward": 4 * 68,
        "combine forward": 3 * 64,
        "combine backward": 4 * 64,
        "dispatch backward": 3 * 68,
    }
    assert terms(plan, 1, load)["ep", "dispatch forward"] == 3 * 68
    assert terms(plan, 1, load)["ep", "dispatch backward"] == 4 * 68


def test_a_block_that_is_recomputed_sends_its_forward_twice() -> None:
    model = replace(FOUR, layers=2)
    changes: dict[str, Any] = {"model": model, "dp_shard": 2, "ep": 2, "microbatches": 1}
    plan = plan_of(**changes, recompute=Recompute(policy="full", every=2))
    rows = tuple(np.array(one) for one in ([[0, 2]] * 8, [[1, 2]] * 8))
    other = tuple(np.array(one) for one in ([[0, 1]] * 8, [[0, 1]] * 8))
    load = ExpertLoad(num_experts=4, choices={(0, 0): rows, (1, 0): other})
    found = terms(plan, 0, load)
    again = sum(found.get(("ep", f"{name} forward again"), 0) for name in ("dispatch", "combine"))
    # Of two blocks the first is run again: its 8 rows each way.
    assert again == 8 * (16 * 8 + 8) + 8 * 16 * 8
    assert found["ep", "counts of rows"] == 3 * 2 * 8
    assert ("ep", "dispatch forward again") not in terms(plan_of(**changes), 0, load)


def test_chunks_tell_their_counts_one_by_one() -> None:
    changes: dict[str, Any] = {"model": FOUR, "dp_shard": 2, "ep": 2}
    whole, parts = plan_of(**changes), plan_of(**changes, experts=ExpertLayout(chunks=4))
    first, second = terms(whole, 0), terms(parts, 0)
    assert second.pop(("ep", "counts of rows")) == 4 * first.pop(("ep", "counts of rows"))
    assert first == second


def test_without_a_record_every_rank_sends_every_other_as_much() -> None:
    plan = plan_of(model=MIXTRAL, dp_shard=4, ep=4, microbatches=3)
    assert balanced_rows(plan, 4) == RowCounts(leaving=12, arriving=12)
    assert terms(plan, 0)["ep", "dispatch forward"] == 3 * 2 * 12 * (16 * 8 + 8)
    formulas = [t.formula for t in bytes_sent(plan, 0) if t.axis == "ep" and "S" in t.formula]
    assert all("balanced" in formula for formula in formulas)


def test_an_even_record_is_the_balanced_one() -> None:
    plan = plan_of(model=MIXTRAL, dp_shard=4, ep=4, microbatches=1)
    even_BTK = np.arange(4 * 8 * 2).reshape(4, 8, 2) % 8
    load = expert_load_from_routing(plan, 2, dict.fromkeys(range(2), even_BTK))
    assert terms(plan, 2, load) == terms(plan, 2)


def test_a_capacity_below_one_bounds_what_is_sent() -> None:
    half = plan_of(model=MIXTRAL, dp_shard=4, ep=4, balance=Balance(capacity_factor=0.5))
    assert balanced_rows(half, 4) == RowCounts(leaving=6, arriving=6)


def test_two_all_to_alls_of_a_large_layer() -> None:
    # The seed has 2 b s d k "bytes": elements, of which 1/N never leave, and half of the way back.
    model = replace(FOUR, hidden=7168, experts=Experts(num_experts=64, top_k=8, ffn=64))
    plan = plan_of(
        model=model, dp_shard=8, ep=8, microbatches=1, sequence_length=4096, dtype="bf16"
    )
    found = terms(plan, 0)
    gates = 4 * 4096 * 8 * 7 // 8
    assert found["ep", "dispatch forward"] + found["ep", "combine forward"] == 822_083_584 + gates
    assert found["ep", "dispatch backward"] + found["ep", "combine backward"] == (
        822_083_584 + gates
    )


def test_padding_sends_all_slots() -> None:
    plan = plan_of(
        model=FOUR,
        dp_shard=2,
        ep=2,
        microbatches=1,
        balance=TIGHT,
        experts=ExpertLayout(padded=True),
    )
    # An expert has room for 8 x 2 / 4 tokens of the sequence; two experts are elsewhere.
    rows = 2 * 4
    assert {name: sent for (axis, name), sent in terms(plan, 0).items() if axis == "ep"} == {
        "dispatch forward": rows * (16 * 8 + 8),
        "combine forward": rows * 16 * 8,
        "combine backward": rows * 16 * 8,
        "dispatch backward": rows * (16 * 8 + 8),
    }
    assert not any("balanced" in term.formula for term in bytes_sent(plan, 0))


def test_two_hops_send_a_token_to_a_node_once() -> None:
    # Ranks 0 and 1 are on the first node, with experts 0 to 3.
    rows = [[4, 5], [0, 6]], [[0, 1], [6, 7]], [[2, 0], [4, 6]], [[1, 5], [-1, 3]]
    load = recorded(8, *rows)
    assert load.pairs((0, 0), 0, 2) == RowCounts(leaving=2, arriving=1)
    assert load.pairs((0, 0), 1, 2) == RowCounts(leaving=1, arriving=2)
    # After the first hop the tokens of ranks 0 and 2 for this node are at rank 0.
    assert load.rows_within((0, 0), 0, 2) == RowCounts(leaving=1, arriving=3)
    assert load.rows_within((0, 0), 1, 2) == RowCounts(leaving=3, arriving=1)
    model = replace(MIXTRAL, layers=1)
    plan = on_nodes(
        2,
        model=model,
        dp_shard=4,
        ep=4,
        microbatches=1,
        sequence_length=2,
        experts=TWO_HOPS,
        dtype="fp32",
    )
    found = {key: sent for key, sent in terms(plan, 0, load).items() if key[0].startswith("ep")}
    assert found == {
        ("ep_across", "counts of rows"): 8,
        ("ep_across", "choices forward"): 2 * 2 * 4,
        ("ep_across", "dispatch forward"): 2 * (64 + 2 * 4),
        ("ep_across", "combine forward"): 1 * 64,
        ("ep_across", "combine backward"): 2 * 64,
        ("ep_across", "dispatch backward"): 1 * (64 + 2 * 4),
        ("ep_within", "counts of rows"): 2 * 8,
        ("ep_within", "dispatch forward"): 1 * (64 + 4),
        ("ep_within", "combine forward"): 3 * 64,
        ("ep_within", "combine backward"): 1 * 64,
        ("ep_within", "dispatch backward"): 3 * (64 + 4),
    }


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(model=MIXTRAL, dp=2, dp_shard=2, cp=2, ep=4, microbatch_sequences=2),
        plan_of(model=MIXTRAL, dp_shard=2, cp=2, tp=2, ep=8, microbatch_sequences=2),
        plan_of(model=MIXTRAL, dp_shard=2, tp=2, ep=2, experts=PIECES, microbatches=3),
    ],
)
def test_every_token_is_dispatched_by_one_rank_or_by_all_pieces(plan: Plan) -> None:
    tokens, k = plan.tokens_per_step, 2
    shape = plan.mathematics.global_sequences, plan.mathematics.sequence_length, k
    numbered = np.arange(tokens * k).reshape(shape)
    held = plan.layout.experts.expert_tp
    seen: list[int] = []
    for group in plan.mesh.expert_groups(expert_tp=held):
        load = expert_load_from_routing(plan, group[0], {0: numbered})
        seen += [int(n) for rows in load.choices.values() for one in rows for n in one.ravel()]
    assert sorted(seen) == sorted(list(range(tokens * k)) * held)


PROVEN = {
    "tp2 scattered, shared": plan_of(
        model=DEEPSEEK, tp=2, ep=2, balance=AUX, sequence_parallel=True
    ),
    "pieces, score": plan_of(
        model=DEEPSEEK,
        cp=2,
        tp=2,
        ep=2,
        microbatch_sequences=2,
        balance=replace(TIGHT, drop="score"),
        experts=PIECES,
    ),
    "recompute, chunks": plan_of(
        model=MIXTRAL,
        dp_shard=2,
        ep=2,
        balance=BY_SEQUENCE,
        recompute=Recompute(policy="full", every=2),
        experts=ExpertLayout(chunks=2),
    ),
    "both ways": plan_of(
        model=replace(MIXTRAL, layers=4),
        pp=2,
        dp_shard=2,
        ep=2,
        balance=AUX,
        schedule="dualpipe",
        microbatches=4,
    ),
    "all to one, ZeRO": plan_of(
        model=MIXTRAL,
        dp=2,
        dp_shard=2,
        ep=2,
        balance=replace(AUX, route="one"),
        zero=Zero(stage=3),
        experts=ExpertLayout(zero_stage=1),
    ),
    "padded": plan_of(
        model=DEEPSEEK,
        dp_shard=2,
        cp=2,
        ep=4,
        microbatch_sequences=2,
        balance=TIGHT,
        experts=ExpertLayout(padded=True, chunks=2),
    ),
    "two hops": on_nodes(
        2,
        model=DEEPSEEK,
        dp_shard=2,
        cp=2,
        tp=2,
        ep=8,
        microbatch_sequences=2,
        balance=TIGHT,
        recompute=Recompute(policy="full"),
        experts=replace(TWO_HOPS, chunks=2),
    ),
}


@pytest.mark.slow
@pytest.mark.one_in(6)
@pytest.mark.parametrize("plan", list(PROVEN.values()), ids=list(PROVEN))
def test_ranks_send_what_the_formulas_say_of_the_routing_of_one_device(
    rank_pool: RankPool, plan: Plan
) -> None:
    proof = prove(plan, run_ranks=rank_pool.run, own_precision=False)
    claims = {claim.rule.id: claim for one in proof.passes for claim in one.claims}
    assert claims["prove-bytes-sent"].failures == ()
    assert claims["prove-bytes-sent"].compared >= 3 * plan.mesh.world_size * 2
