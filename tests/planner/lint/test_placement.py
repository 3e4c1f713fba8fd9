"""Every lint of this room finds its fault in one plan, and nothing in another that is cured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.planner.lint import placement
from echelon.planner.lint.checks import lint
from echelon.planner.lint.finding import lints_of
from tests.handbook.guides.situations import plan_of
from tests.planner.lint.cured import assert_found_and_cured

CASES = {
    "tp-across-nodes": (
        "gpt3-175b 16xh100 mesh.tp=16",
        "gpt3-175b 16xh100 mesh.tp=8 mesh.pp=2",
    ),
    "pp-inside-tp-outside": (
        "gpt2 16xh100 mesh.tp=3 mesh.pp=4",
        "gpt2 16xh100 mesh.tp=2 mesh.pp=6",
    ),
    "context-all-to-all-across-nodes": (
        "gpt3-175b 16xh100 mesh.cp=16 context.kind=gathered",
        "gpt3-175b 16xh100 mesh.cp=16 context.kind=ring",
    ),
    "experts-across-nodes": (
        "qwen3-30b-a3b 16xh100 mesh.dp_shard=16 mesh.ep=16 zero.stage=1",
        "qwen3-30b-a3b 16xh100 mesh.dp_shard=16 mesh.ep=8 zero.stage=1",
    ),
    "part-of-a-node": (
        "gpt2 16xh100 mesh.dp_replicate=12 batch.global_sequences=480",
        "gpt2 16xh100 mesh.dp_replicate=16",
    ),
    # K8 (S49): profile before optimizing.
    "axes-without-measurement": (
        "gpt3-175b 64xh100 mesh.tp=8 mesh.pp=8",
        "gpt3-175b 8xh100 mesh.tp=8",
    ),
    "idle-devices": ("gpt2 8xh100 mesh.dp_replicate=4", "gpt2 8xh100 mesh.dp_replicate=8"),
    "microbatches-per-stage": (
        "gpt2 4xh100 mesh.pp=4 batch.global_sequences=8 batch.microbatch_sequences=1",
        "gpt2 4xh100 mesh.pp=4 batch.global_sequences=16 batch.microbatch_sequences=1",
    ),
    "gpipe-holds-all": (
        "gpt2 4xh100 mesh.pp=4 pipeline.schedule=gpipe",
        "gpt2 4xh100 mesh.pp=4 pipeline.schedule=1f1b",
    ),
    "stages-uneven": (
        "gpt2 2xh100 mesh.pp=2 pipeline.stages=[[0,1,2],[3,4,5,6,7,8,9,10,11]]",
        "llama2-7b 2xh100 mesh.pp=2",
    ),
    "empty-stages": (
        "gpt2 4xh100 mesh.pp=4 pipeline.stages=[[0,1,2,3],[],[4,5,6,7],[8,9,10,11]]",
        "gpt2 4xh100 mesh.pp=4",
    ),
}


@pytest.mark.system("S49")
@pytest.mark.parametrize("name", CASES)
def test_a_lint_finds_its_fault_and_nothing_where_it_is_cured(name: str) -> None:
    assert_found_and_cured(name, *CASES[name])


@pytest.mark.system("S49")
def test_what_was_measured_is_not_to_be_measured_again() -> None:
    """S49: nothing is said of a cluster whose constants `echelon calibrate` has found."""
    plan = plan_of("gpt3-175b 64xh100 mesh.tp=8 mesh.pp=8")
    assert "axes-without-measurement" in {one.id for one in lint(plan)}
    measured = replace(plan, cluster=replace(plan.cluster, trainer=(("host_s", 1e-5),)))
    assert "axes-without-measurement" not in {one.id for one in lint(measured)}


def test_every_lint_has_a_case() -> None:
    assert sorted(CASES) == sorted(each.id for each in lints_of(placement))
