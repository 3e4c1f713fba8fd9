"""The dtypes and the loss scale of a DeepSpeed JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.interop.imports import Imports, rows_of, zero


@pytest.fixture
def deepspeed(tmp_path: Path) -> Imports:
    return Imports(tmp_path, "deepspeed")


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
