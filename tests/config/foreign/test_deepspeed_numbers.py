"""Batch, ranks and precision of a DeepSpeed JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.config.foreign.imports import Imports, rows_of, zero


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
    assert problem.works == ("train_batch_size = 32",)
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
    assert deepspeed(zero(2)).job.plan.mesh.dp_shard == 8
    sets = ["cluster.preset=16xh100", "mesh.tp=2"]
    assert deepspeed(zero(2), sets=sets).job.plan.mesh.dp_shard == 8
    (problem,) = deepspeed.problems(zero(2), ranks=5, sets=sets)
    assert (problem.rule, problem.works) == ("import-ranks", ("4", "6"))


@pytest.mark.parametrize(
    ("config", "dtypes"),
    [
        ({}, ("fp32", "fp32", "fp32", "fp32")),
        ({"bf16": {"enabled": True}}, ("bf16", "bf16", "bf16", "fp32")),
        ({"bfloat16": {"enabled": True}}, ("bf16", "bf16", "bf16", "fp32")),
        ({"fp16": {"enabled": True}}, ("fp16", "fp16", "fp16", "fp32")),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, ("fp32",) * 4),
        (
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
            ("bf16", "fp32", "bf16", "fp32"),
        ),
        (
            {"bf16": {"enabled": True}, "communication_data_type": "fp32"},
            ("bf16", "bf16", "fp32", "fp32"),
        ),
    ],
)
def test_the_dtype_of_every_role(
    deepspeed: Imports, config: dict[str, Any], dtypes: tuple[str, ...]
) -> None:
    precision = deepspeed({**zero(2), **config}, ranks=2).job.plan.mathematics.precision
    roles = (precision.parameters, precision.gradients, precision.reduction, precision.master)
    assert roles == dtypes


def test_a_loss_scale_of_zero_follows_overflows_and_another_is_fixed(deepspeed: Imports) -> None:
    keys = {
        "enabled": True,
        "initial_scale_power": 12,
        "loss_scale_window": 50,
        "hysteresis": 1,
        "consecutive_hysteresis": True,
        "min_loss_scale": 4,
    }
    precision = deepspeed({"fp16": {**keys, "loss_scale": 0}}).job.plan.mathematics.precision
    assert (precision.loss_scaling, precision.loss_scale) == ("dynamic", 4096.0)
    assert (precision.loss_scale_window, precision.loss_scale_min) == (50, 4.0)
    assert precision.loss_scale_hysteresis == 1
    precision = deepspeed({"fp16": {**keys, "loss_scale": 128}}).job.plan.mathematics.precision
    assert (precision.loss_scaling, precision.loss_scale) == ("fixed", 128.0)
    off = deepspeed({"fp16": {**keys, "enabled": False}})
    assert off.job.plan.mathematics.precision.loss_scaling == "none"
    assert rows_of(off, "fp16.hysteresis")[0].why == "fp16 is off"


def test_what_precision_refuses(deepspeed: Imports) -> None:
    both = {"fp16": {"enabled": True}, "bf16": {"enabled": True}}
    assert [rule for rule, _ in deepspeed.refused(both)] == ["import-conflict"]
    refilled = {"fp16": {"enabled": True, "consecutive_hysteresis": True}}
    assert deepspeed.refused(refilled) == [("import-not-honoured", "fp16.consecutive_hysteresis")]
    for table, name in (
        ("fp16", "fp16_master_weights_and_grads"),
        ("bf16", "bf16_master_weights_and_grads"),
        ("bf16", "bf16_optimizer_states"),
    ):
        config = {table: {"enabled": True, name: True}}
        assert deepspeed.refused(config) == [("import-not-honoured", f"{table}.{name}")]
    names = {"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}
    assert ("import-conflict", "bf16, bfloat16") in deepspeed.refused(names)
