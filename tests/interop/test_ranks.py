"""The ranks of an imported run, and the sizes of its batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.interop.imports import Imports, zero


@pytest.fixture
def deepspeed(tmp_path: Path) -> Imports:
    return Imports(tmp_path, "deepspeed")


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"train_batch_size": 64}, (64, 16, 1)),
        ({"train_micro_batch_size_per_gpu": 2}, (8, 2, 1)),
        ({"gradient_accumulation_steps": 3}, (24, 2, 3)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, (64, 2, 8)),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, (64, 8, 2)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, (24, 2, 3)),
        ({}, (16, 2, 2)),
    ],
)
@pytest.mark.parametrize("rest", [{}, {"auto": True}])
def test_the_sizes_of_a_batch_follow_from_one_another(
    deepspeed: Imports, sizes: dict[str, int], expected: tuple[int, int, int], rest: dict[str, bool]
) -> None:
    config: dict[str, Any] = {**zero(1), **sizes}
    if rest:
        for name in ("train_batch_size", "gradient_accumulation_steps"):
            config.setdefault(name, "auto")
    plan = deepspeed(config, ranks=4).job.plan
    found = (
        plan.mathematics.global_sequences,
        plan.layout.microbatch_sequences,
        plan.num_microbatches,
    )
    assert found == expected


def test_three_sizes_of_a_batch_tell_the_ranks(deepspeed: Imports) -> None:
    sizes = {
        "train_batch_size": 48,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
    }
    plan = deepspeed({**zero(2), **sizes}).job.plan
    assert plan.mesh.dp_shard == 6
    (problem,) = deepspeed.problems({**zero(2), **sizes}, ranks=4)
    assert problem.rule == "import-conflict"
    assert problem.suggestions == ("train_batch_size = 32",)
    (problem,) = deepspeed.problems({**zero(2), **sizes, "train_batch_size": 50})
    assert problem.rule == "import-conflict"
    assert "6.25" in problem.message


def test_a_batch_that_does_not_divide_names_its_keys(deepspeed: Imports) -> None:
    (problem,) = deepspeed.problems({**zero(2), "train_batch_size": 10}, ranks=4)
    assert problem.rule == "batch-divides"
    assert "train_batch_size = 10" in problem.message
    config = {**zero(2), "train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}
    (problem,) = deepspeed.problems(config, ranks=2)
    assert problem.rule == "batch-divides"
    assert "foreign: train_batch_size" in problem.set_by


def test_without_a_number_of_ranks_the_launcher_takes_all_devices(deepspeed: Imports) -> None:
    found = deepspeed(zero(2))
    assert found.job.plan.mesh.dp_shard == 8
    assert found.assumptions == (
        "8 ranks: the launcher takes all devices: laptop has 8; --ranks N says how many",
    )
    sets = ["cluster.preset=16xh100", "mesh.tp=2"]
    assert deepspeed(zero(2), sets=sets).job.plan.mesh.dp_shard == 8
    (problem,) = deepspeed.problems(zero(2), ranks=5, sets=sets)
    assert (problem.rule, problem.suggestions) == ("import-ranks", ("4", "6"))
