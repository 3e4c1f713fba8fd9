"""The matrix of layouts: its size, and a random part of it proven in each run."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.core.plan import Plan, Zero
from echelon.launch.pool import RankPool
from echelon.prove import matrix
from echelon.prove.cases import cases
from echelon.prove.matrix import AnyCase, every_case, prove_case, sample, walk
from echelon.prove.shrink import shrink
from echelon.prove.zero_cases import HOMES, LAYOUTS, OPTIMIZERS, STAGES, zero_cases
from echelon.schedule.build import build_schedule

COUNT = 40
SEED = random.SystemRandom().randrange(10**6)


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


def test_the_matrix_of_zero_is_whole() -> None:
    every = list(zero_cases())
    assert len({case.name for case in every_case()}) == len(every) + 728
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


def test_a_sample_is_a_function_of_its_seed() -> None:
    assert sample(10, seed=1) == sample(10, seed=1) != sample(10, seed=2)
    assert len(set(sample(60, seed=3))) == 60


@pytest.mark.parametrize("number", range(COUNT))
def test_a_random_part_is_proven(number: int, rank_pool: RankPool) -> None:
    # By number, not by name: the workers of a parallel test run must collect the same tests.
    case = sample(COUNT, SEED)[number]
    print(f"seed {SEED}, case {case.name}")
    problem = prove_case(case, rank_pool.run)
    assert not problem, f"python -m echelon.prove.matrix --match {case.name}\n{problem}"


def test_a_walk_takes_up_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    walked: list[str] = []

    def pretend(case: AnyCase, run_ranks: object) -> str:
        walked.append(case.name)
        return "error: wrong" if "-tp2" in case.name else ""

    monkeypatch.setattr(matrix, "prove_case", pretend)
    chosen = [case for case in cases() if case.pp == 1 and case.dp == 1]
    results = tmp_path / "matrix.jsonl"
    wrong = sum(case.tp == 2 for case in chosen)

    assert walk(chosen, results) == wrong
    assert len(walked) == len(chosen)
    assert f"{len(chosen) - wrong} of {len(chosen)} proven" in capsys.readouterr().out
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    assert [line["name"] for line in lines] == walked

    walked.clear()
    assert walk(chosen, results) == wrong
    assert len(walked) == wrong
