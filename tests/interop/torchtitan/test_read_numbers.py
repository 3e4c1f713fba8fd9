"""What changes the numbers of a torchtitan run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.imports import Imports
from tests.interop.torchtitan.configs import small


@pytest.fixture
def titan(tmp_path: Path) -> Imports:
    return Imports(tmp_path, "torchtitan")


def test_a_pipeline_does_not_drain_within_a_step(titan: Imports) -> None:
    text = small("global_batch_size = 16", parallel="pipeline_parallel_degree = 2")
    (problem,) = titan.problems(text, extends="nano")
    assert problem.rule == "import-not-honoured"
    assert problem.suggestions[0] == "training.local_batch_size = 8"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ('decay_type = "cosine"\nmin_lr_factor = 0.1', ("cosine", 0, 0.1)),
        ('decay_type = "cosine"\nlr_min = 0.1', ("cosine", 0, 0.1)),
        ("decay_ratio = 0.2", ("wsd", 20, 0.0)),
        ("decay_ratio = 0.0", ("constant", 0, 0.1)),
    ],
)
def test_the_learning_rate(titan: Imports, lines: str, expected: tuple[str, int, float]) -> None:
    text = small("steps = 100") + f"\n[lr_scheduler]\nwarmup_steps = 10\n{lines}"
    optimizer = titan(text, extends="nano").job.plan.mathematics.optimizer
    assert (optimizer.schedule, optimizer.decay_steps, optimizer.final_ratio) == expected


def test_infinity_does_not_clip_and_offload_moves_all(titan: Imports) -> None:
    plan = titan(small("max_norm = inf\nenable_cpu_offload = true"), extends="nano").job.plan
    assert plan.mathematics.optimizer.clip_norm is None
    assert plan.layout.zero.parameter_offload == plan.layout.zero.optimizer_offload == "host"
