"""The matrix of layouts: its size, and a random part of it proven in each run."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from echelon.config.expert_plan import expert_problems
from echelon.core.plan import Plan, Zero
from echelon.launch.pool import RankPool
from echelon.models.batch import IGNORED_LABEL
from echelon.prove import matrix
from echelon.prove.batches import global_batch
from echelon.prove.cases import POLICIES, cases
from echelon.prove.context_cases import context_cases
from echelon.prove.expert_cases import expert_cases
from echelon.prove.matrix import AnyCase, every_case, prove_case, sample, walk
from echelon.prove.oracle import run_oracle
from echelon.prove.pipeline_cases import AUTO, BESIDE, FILE, num_microbatches, pipeline_cases
from echelon.prove.shrink import shrink
from echelon.prove.zero_cases import HOMES, LAYOUTS, OPTIMIZERS, STAGES, zero_cases
from echelon.schedule.build import SCHEDULES, build_schedule
from echelon.schedule.check import check_schedule
from echelon.schedule.of_plan import schedule_of

COUNT = 30
SEED = random.SystemRandom().randrange(10**6)


@cache
def built(case: AnyCase) -> Plan:
    """Return the plan of a case; some pipelines take a search, and two tests look at them."""
    return case.plan()


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


def test_the_matrix_of_pipelines_is_whole() -> None:
    every = list(pipeline_cases())
    assert {(case.schedule, case.pp, case.beside, case.recompute) for case in every} == set(
        product((*SCHEDULES, FILE, AUTO), (2, 4), BESIDE, POLICIES)
    )
    assert len(every) == len(SCHEDULES) * 168 + 2 * 168 == 2016
    assert {case.world_size for case in every} == {2, 4, 8}
    for schedule, pp, microbatches in product(SCHEDULES, (2, 4), ("p", "2p", "3p+1")):
        count = num_microbatches(schedule, pp, microbatches)
        allowed = SCHEDULES[schedule].allows_microbatches
        assert allowed(pp, count)
        asked = {"p": pp, "2p": 2 * pp, "3p+1": 3 * pp + 1}[microbatches]
        assert not any(allowed(pp, less) for less in range(asked, count))


def test_a_fifth_of_the_pipelines_are_legal_plans_and_shrink_to_such() -> None:
    met: set[str] = set()
    for case in pipeline_cases():
        if case.turn % 5:  # the search takes its time
            continue
        plan = built(case)
        planned = schedule_of(plan)
        check_schedule(planned)
        counts = [len(stage) for stage in plan.layout.pipeline.stages]
        assert planned.num_stages == len(counts)
        assert planned.num_microbatches == plan.num_microbatches
        met |= {"empty"} if 0 in counts else set()
        met |= {"uneven"} if max(counts) > 1 else set()
        met |= {"both ways in a file"} if planned.mirrored and case.schedule == FILE else set()
        met |= {"sequence parallel"} if plan.layout.sequence_parallel else set()
        met |= {plan.mathematics.optimizer.kind, f"per rank {len(counts) // case.pp}"}
        if case.turn % 9 == 0:
            assert Plan.from_json(plan.to_json()) == plan
            check_schedule(schedule_of(shrink(plan)))
    assert met == {
        *("both ways in a file", "empty", "uneven", "sequence parallel", "adamw", "sgd", "muon"),
        *("per rank 1", "per rank 2"),
    }


def test_the_matrix_of_contexts_is_whole() -> None:
    every = list(context_cases())
    met = {(case.kind, case.cp, case.mask, case.heads, case.beside) for case in every}
    assert met == set(
        product(
            ("ring", "striped", "gathered", "ulysses", "ulysses-ring"),
            (2, 4),
            ("causal", "full", "documents", "window"),
            ("mha", "gqa", "mqa"),
            ("alone", "tp2", "tp2sp", "zero3", "pp2", "tp2pp2"),
        )
    )
    assert len(met) == len(every) == 720
    assert max(case.world_size for case in every) == 16


def test_masks_heads_and_ends_of_windows_stay_in_a_proof() -> None:
    ends: set[str] = set()
    uneven = 0
    others: set[tuple[str, bool, str]] = set()
    for case in context_cases():
        plan = case.plan()
        assert Plan.from_json(plan.to_json()) == plan
        small = shrink(plan)
        shape, tp, length = small.model, plan.mesh.tp, small.mathematics.sequence_length
        chunk = length // (2 * case.cp)
        assert chunk >= 4
        assert shape.heads // tp % plan.layout.context.ulysses_degree == 0
        assert (shape.mask.causal, shape.soft_cap) == (plan.model.causal, plan.model.soft_cap)
        assert shape.heads // shape.kv_heads == {"mha": 1, "gqa": 2, "mqa": 4}[case.heads]
        assert (small.mathematics.documents == "separate") == (case.mask == "documents")
        assert (shape.window is None) == (plan.model.window is None)
        if case.mask == "window":
            assert shape.window is not None
            ends.add("inside" if shape.window <= chunk else "beyond")
        if case.mask == "full":
            assert not shape.mask.causal
            assert shape.mask.window is None
        batch = global_batch(small, 0)
        counts = {
            int((batch.labels_BT[:, small.placement.positions(rank)] != IGNORED_LABEL).sum())
            for rank in range(case.cp)
        }
        others.add((shape.positions, shape.soft_cap is None, small.layout.recompute.policy))
        uneven += len(counts) > 1
    assert ends == {"inside", "beyond"}
    assert uneven > 0.9 * 720
    kinds = {(position, capped) for position, capped, policy in others if policy}
    assert kinds == {("rope", True), ("rope", False), ("learned", True), ("learned", False)}


def test_the_matrix_of_experts_is_whole() -> None:
    every = list(expert_cases())
    met = {(case.ep, case.beside, case.balance, case.capacity, case.load) for case in every}
    beside = ("alone", "dp2", "replicas2", "tp2", "tp2sp", "expert_tp2", "pp2", "cp2")
    stages = [f"zero{dense}{experts}" for dense in STAGES for experts in STAGES]
    assert met == set(
        product(
            (2, 4),
            (*beside, *stages),
            ("aux", "bias"),
            (False, True),
            ("even", "empty", "one", "scores"),
        )
    )
    assert len(met) == len(every) == 768
    assert {case.world_size for case in every} == {2, 4, 8}


def test_every_setting_of_experts_is_met_and_stays_in_a_proof() -> None:
    travels: set[tuple[str, bool, int]] = set()
    kinds: set[tuple[str, bool, bool]] = set()
    balances: set[tuple[str, str, bool]] = set()
    folds: set[tuple[str, int]] = set()
    for case in expert_cases():
        plan = case.plan()
        assert Plan.from_json(plan.to_json()) == plan
        small = shrink(plan)
        assert not [*expert_problems(plan), *expert_problems(small)]
        assert small.layout.experts == plan.layout.experts
        assert (small.layout.zero.stage, small.layout.experts.zero_stage) == case.zero_stages
        experts, balance = small.model.experts, small.mathematics.balance
        assert experts is not None
        assert experts.num_experts // case.ep >= 2
        assert balance.has_bias == (case.balance == "bias")
        assert (balance.capacity_factor is not None) == case.capacity
        travels.add((plan.layout.experts.dispatch, plan.layout.experts.padded, case.ep))
        kinds.add((experts.router, experts.renormalise, small.model.latent is not None))
        balances.add((balance.aux_over, balance.drop, balance.z_coefficient > 0))
        folds.add((case.beside, plan.mesh.expert_shard_degree()))
    assert travels == {
        *(("flat", padded, ep) for padded in (False, True) for ep in (2, 4)),
        ("two-hop", False, 4),
    }
    assert kinds == {
        *(("softmax", renormalised, False) for renormalised in (False, True)),
        *(("sigmoid", True, latent) for latent in (False, True)),
    }
    assert balances == set(
        product(("global", "sequence", "microbatch"), ("position", "score"), (False, True))
    )
    assert {("tp2", 1), ("tp2", 2), ("cp2", 1), ("cp2", 2), ("dp2", 2)} < folds


@pytest.mark.parametrize("family", [zero_cases, pipeline_cases, context_cases])
def test_other_matrices_have_experts_too(family: Callable[[], Iterator[AnyCase]]) -> None:
    kinds: set[tuple[int, int, int]] = set()
    for case in family():
        if case.turn % 5:  # building pipelines takes its time
            continue
        plan = built(case)
        layout = plan.layout.experts
        if plan.model.experts is not None:
            assert not [*expert_problems(plan), *expert_problems(shrink(plan))]
            kinds.add((plan.mesh.ep, layout.expert_tp, layout.zero_stage))
    assert {ep for ep, _, _ in kinds} == {1, 2}
    assert {pieces for _, pieces, _ in kinds} == {1, 2}
    assert {stage for _, _, stage in kinds} >= ({0, 3} if family is context_cases else {0, 1, 2, 3})


@pytest.mark.parametrize("load", ["even", "empty", "one", "scores"])
def test_loads_are_as_their_case_says(load: str) -> None:
    for case in expert_cases():
        if (case.beside, case.load) != ("alone", load):
            continue
        for routed in run_oracle(shrink(case.plan(), precision="fp64"), 1)[0].routed.values():
            counts = routed.counts_E
            assert bool(routed.dropped) <= case.capacity
            if load == "even":
                assert int(counts.max() - counts.min()) <= 1
            if load == "empty":
                assert counts[-1] == 0
            if load == "one":
                assert int((counts > 0).sum()) == routed.picked_BTK.shape[-1]
            if case.capacity and load != "even":
                assert 0 < routed.dropped < routed.kept_BTK.numel()


def test_the_whole_matrix_is_all_five() -> None:
    parts = (
        list(cases()),
        list(zero_cases()),
        list(pipeline_cases()),
        list(context_cases()),
        list(expert_cases()),
    )
    names = [case.name for part in parts for case in part]
    assert [case.name for case in every_case()] == names
    assert len(set(names)) == len(names)


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
