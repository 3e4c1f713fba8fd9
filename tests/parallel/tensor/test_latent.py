"""Latent attention over tensor ranks equals that of one device, and sends narrow rows only."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.core.model_shape import ModelShape
from echelon.core.parameters import parameters
from echelon.core.plan import Plan
from echelon.cost.bytes.sent import tensor_bytes
from echelon.cost.bytes.terms import all_gather_bytes, all_reduce_bytes
from echelon.launch.local.supervisor import RankPool
from echelon.layout.stage import partial_over_tensor, rank_part
from tests.config.problems import SMALL, problems_of, write
from tests.models.latent_shapes import EQUAL_WIDTHS, LATENT
from tests.parallel.layouts import plan_of
from tests.parallel.one_device import assemble
from tests.parallel.targets import Pass
from tests.parallel.tensor.test_tensor import close, kinds, reference, run, whole

SCATTERED = pytest.mark.parametrize("scattered", [False, True], ids=["whole", "scattered"])


def latent_plan(tp: int, *, scattered: bool, model: ModelShape = LATENT) -> Plan:
    """Return a plan of one microbatch of two sequences over tensor ranks only."""
    return plan_of(
        model=model, tp=tp, sequence_parallel=scattered, microbatches=1, microbatch_sequences=2
    )


@SCATTERED
@pytest.mark.parametrize(
    ("model", "tp"),
    [(LATENT, 1), (LATENT, 2), (LATENT, 4), (EQUAL_WIDTHS, 2)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_block_equals_that_of_one_device(
    rank_pool: RankPool, model: ModelShape, tp: int, scattered: bool
) -> None:
    plan = latent_plan(tp, scattered=scattered, model=model)
    ranks = run(rank_pool, plan)
    y_ND, dx_ND, grads = reference(plan)
    close(whole(plan, [rank.out for rank in ranks]), y_ND, "output")
    close(whole(plan, [rank.dx for rank in ranks]), dx_ND, "input gradient")
    got = assemble(plan, [rank.gradients for rank in ranks])
    assert {name for name in grads if "attention.kv_" in name} <= set(got)
    for name, expected in grads.items():
        close(got[name], expected, name)


def test_gradients_of_three_narrow_vectors_are_summed(rank_pool: RankPool) -> None:
    for one in run(rank_pool, latent_plan(2, scattered=False)):
        assert kinds(one) == {
            ("all_reduce", "row.forward"): 2,
            # Of q_up, of kv_up, and of the MLP.
            ("all_reduce", "column.backward"): 3,
            ("all_reduce", "shared.backward"): 1,
        }


def test_scattered_ranks_gather_narrow_rows(rank_pool: RankPool) -> None:
    for one in run(rank_pool, latent_plan(2, scattered=True)):
        found = Counter({key: n for key, n in kinds(one).items() if "gradients" not in key[1]})
        assert found == {
            ("all_gather", "column.forward"): 3,
            ("all_gather", "shared.forward"): 1,
            ("reduce_scatter", "row.forward"): 2,
            ("all_gather", "row.backward"): 2,
            ("all_gather", "column.backward.input"): 3,
            ("reduce_scatter", "column.backward"): 3,
            ("reduce_scatter", "shared.backward"): 1,
        }


def sent(one: Pass) -> int:
    """Return the bytes of a block that went over tensor ranks, but those of buckets."""
    return sum(e.bytes for e in one.events if e.axis == "tp" and "gradients" not in e.name)


@SCATTERED
@pytest.mark.parametrize("tp", [2, 4])
def test_bytes_of_a_block_are_those_of_the_formula(
    rank_pool: RankPool, tp: int, scattered: bool
) -> None:
    plan = latent_plan(tp, scattered=scattered)
    one_block = replace(LATENT, layers=1)
    layout = replace(plan.layout, pipeline=replace(plan.layout.pipeline, stages=((0,),)))
    alone = replace(plan, layout=layout, mathematics=replace(plan.mathematics, model=one_block))
    terms = tensor_bytes(alone, rank_part(alone, 0), (), 0)
    wanted = sum(t.bytes for t in terms if t.name.startswith(("blocks", "latent vectors")))
    assert [sent(one) for one in run(rank_pool, plan)] == [wanted] * tp
    # By hand: 16 tokens of 8 bytes; widths 32, and 12, 8 and 4.
    if scattered:
        pieces = (3 + 4) * 32 + 2 * (12 + 8 + 4) + 12 + 8
        assert wanted == all_gather_bytes(16 // tp * 8 * pieces, tp)
    else:
        assert wanted == all_reduce_bytes(16 * 8 * ((2 + 1) * 32 + 12 + 8 + 4), tp)


@SCATTERED
def test_what_leads_down_is_partial_where_the_rows_of_a_rank_are(scattered: bool) -> None:
    plan = latent_plan(2, scattered=scattered)
    partial = {s.name for s in parameters(plan.model) if partial_over_tensor(plan, s)}
    attention = {name for name in partial if ".0.attention." in name}
    names = ("q_norm", "kv_norm", "q_down", "kv_down")
    wanted = {f"layers.0.attention.{name}.weight" for name in names}
    assert attention == (wanted if scattered else set())


def test_tensor_ranks_that_do_not_divide_the_heads_are_refused(tmp_path: Path) -> None:
    latent = [
        f"model.latent.{name}={value}"
        for name, value in (
            *(("query_rank", 12), ("kv_rank", 8)),
            *(("nope_dim", 6), ("rope_dim", 4), ("value_dim", 6)),
        )
    ]
    shape = ["model.heads=6", "model.kv_heads=6", "model.head_dim=10", *latent]
    found = problems_of(write(tmp_path, SMALL), ["mesh.tp=4", *shape])
    assert "tp-divides-heads" in found
    assert "6 % 4 = 2" in found["tp-divides-heads"].message
