"""The matrix of data, tensor and pipeline layouts: it is whole, and each case is a legal plan."""

from __future__ import annotations

from echelon.core.plan import Plan
from echelon.schedule.build import build_schedule
from tests.walks.matrix.cases import cases


def test_the_matrix_is_whole() -> None:
    every = list(cases())
    assert len({case.name for case in every}) == len(every) == 728
    degrees = {(case.dp, case.tp, case.pp) for case in every}
    assert len(degrees) == 17
    assert (4, 2, 1) in degrees
    assert (1, 2, 4) in degrees
    assert all(case.dp * case.tp * case.pp <= 8 for case in every)
    assert {case.schedule for case in every} == {"naive", "gpipe", "1f1b"}
    assert {(case.tied, case.accumulation, case.recompute) for case in every} == {
        (tied, accumulation, recompute)
        for tied in (False, True)
        for accumulation in (1, 3)
        for recompute in ("none", "full")
    }


def test_every_case_is_a_legal_plan() -> None:
    kinds: set[tuple[str, str, bool]] = set()
    for case in cases():
        plan = case.plan()
        shape, layout = plan.model, plan.layout
        assert Plan.from_json(plan.to_json()) == plan
        assert plan.mesh.world_size == case.dp * case.tp * case.pp
        assert plan.mesh.dp == case.dp
        assert shape.kv_heads % case.tp == shape.heads % shape.kv_heads == shape.ffn % case.tp == 0
        assert len(layout.pipeline.stages) == case.pp
        assert (len({len(stage) for stage in layout.pipeline.stages}) > 1) == case.uneven_stages
        build_schedule(
            case.schedule,
            num_stages=case.pp,
            num_ranks=case.pp,
            num_microbatches=plan.num_microbatches,
        )
        kinds.add((shape.norm, shape.positions, shape.qk_norm))
    assert len(kinds) == 3
