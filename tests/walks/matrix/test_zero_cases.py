"""The matrix of ZeRO is whole; every setting is met at every stage that has it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.plan import Plan, Zero
from echelon.proof.shrink import shrink
from tests.walks.matrix.cases import OPTIMIZERS, STAGES
from tests.walks.matrix.zero_cases import HOMES, LAYOUTS, zero_cases


def test_the_matrix_of_zero_is_whole() -> None:
    every = list(zero_cases())
    met = {(case.stage, case.layout, case.optimizer, case.home) for case in every}
    assert met == {
        (stage, layout, optimizer, home)
        for stage in STAGES
        for layout in LAYOUTS
        for optimizer in OPTIMIZERS
        for home in HOMES
        if stage or home == "none"
    }
    assert len(every) == len(met) * 2 * 2 * 2
    assert {case.world_size for case in every} == {2, 4, 8}


@pytest.mark.slow
def test_every_setting_of_zero_is_met_at_every_stage_that_has_it() -> None:
    plans = [case.plan() for case in zero_cases()]
    for plan in plans:
        assert Plan.from_json(plan.to_json()) == plan
        small = shrink(plan)
        assert replace_sizes(small.layout.zero) == replace_sizes(plan.layout.zero)
        assert bool(small.layout.zero.keep_whole_below) == bool(plan.layout.zero.keep_whole_below)
    settings = {
        stage: [p.layout.zero for p in plans if p.layout.zero.stage == stage] for stage in STAGES
    }
    for stage in (1, 2, 3):
        assert {zero.accumulate for zero in settings[stage]} == {"whole", "slices"}
        assert {zero.offload_buffers for zero in settings[stage]} == {2, 3}
    cut = settings[3]
    assert {(z.reshard_after_forward, z.prefetch) for z in cut} == {
        (reshard, ahead) for reshard in (True, False) for ahead in (0, 1, 2)
    }
    assert {(z.unit_blocks, z.keep_whole_below > 0) for z in cut} == {
        (blocks, kept) for blocks in (1, 2) for kept in (True, False)
    }
    assert {(z.optimizer_offload, z.parameter_offload) for z in cut} == {
        ("none", "none"),
        *((home, other) for home in ("host", "nvme") for other in ("none", home)),
    }
    assert {plan.mathematics.optimizer.decay for plan in plans} == {"matrices", "blocks", "all"}
    assert {plan.layout.sequence_parallel for plan in plans if plan.mesh.tp > 1} == {True, False}


def replace_sizes(zero: Zero) -> Zero:
    """Return the settings but for those that are sizes, which a proof makes small."""
    return replace(zero, bucket_bytes=0, keep_whole_below=0, offload_buffers=0)
