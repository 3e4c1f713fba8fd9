"""What replicas on threads refuse, and the values that work."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config.load import load_job
from echelon.config.plan_view import plan_settings
from echelon.config.rules.plan import plan_problems
from tests.config.problems import SMALL, SPARSE, problems_of, write

TWO = ("threads.replicas=2", "batch.microbatch_sequences=4")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path, SMALL)


def test_replicas_are_planned_and_read_back(small: Path) -> None:
    plan = load_job(small, TWO).plan
    assert plan.layout.threads.replicas == 2
    assert plan_settings(plan)["threads.replicas"] == 2
    assert plan_problems(plan) == []
    assert load_job(small).plan.layout.threads.replicas == 1


def test_threads_are_one_process(small: Path) -> None:
    found = problems_of(small, [*TWO, "mesh.dp_replicate=2", "mesh.tp=2"])
    assert list(found) == ["threads-are-one-process"]
    problem = found["threads-are-one-process"]
    assert "dp_replicate 2" in problem.message
    assert problem.suggestions == (
        "threads.replicas = 1",
        "mesh.dp_replicate = 1 with mesh.tp = 1",
    )


def test_threads_divide_a_microbatch(small: Path) -> None:
    found = problems_of(small, ["threads.replicas=3", "batch.microbatch_sequences=4"])
    assert list(found) == ["threads-divide-microbatch"]
    problem = found["threads-divide-microbatch"]
    assert "4 % 3 = 1" in problem.message
    assert problem.suggestions == (
        "threads.replicas = 2",
        "threads.replicas = 4",
        "batch.microbatch_sequences = 3",
        "batch.microbatch_sequences = 6",
    )


def test_threads_fit_a_node(small: Path) -> None:
    sets = ["threads.replicas=16", "batch.microbatch_sequences=16", "cluster.preset=16xh100"]
    found = problems_of(small, [*sets, "batch.global_sequences=16"])
    assert list(found) == ["threads-fit-node"]
    assert found["threads-fit-node"].suggestions == (
        "threads.replicas = 8",
        "threads.replicas = 4",
    )


@pytest.mark.parametrize(
    ("setting", "mended"),
    [
        ("pipeline.schedule=zb-h1", 'pipeline.schedule = "1f1b"'),
        ("zero.stage=1", "zero.stage = 0"),
        ("precision.matmul=fp8", 'precision.matmul = "parameters"'),
        ("kernels.provider=compiled", 'kernels.provider = "plain"'),
    ],
)
def test_replicas_share_nothing_within_a_pass(small: Path, setting: str, mended: str) -> None:
    more = ("zero.optimizer_offload=host",) if setting.startswith("zero") else ()
    if "fp8" in setting:
        more = ("precision.fp8_block=8",)
    found = problems_of(small, [*TWO, setting, *more])
    problem = found["threads-share-nothing"]
    assert problem.key == setting.partition("=")[0]
    if not more:
        assert list(found) == ["threads-share-nothing"]
        assert problem.suggestions == (mended, "threads.replicas = 1")


def test_experts_are_for_ranks(tmp_path: Path) -> None:
    found = problems_of(write(tmp_path, SPARSE), TWO)
    assert found["threads-share-nothing"].key == "model.experts.num_experts"
    assert found["threads-share-nothing"].suggestions == ("threads.replicas = 1",)
