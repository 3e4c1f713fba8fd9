"""The numbers of a Megatron-LM command: precision, loss scale, optimizer, learning rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.interop.imports import Imports
from tests.interop.megatron.commands import small


@pytest.fixture
def megatron(tmp_path: Path) -> Imports:
    return Imports(tmp_path, "megatron")


@pytest.mark.parametrize(
    ("more", "dtypes"),
    [
        ("", ("fp32", "fp32", "fp32")),
        ("--bf16", ("bf16", "fp32", "fp32")),
        ("--bf16 --grad-reduce-in-bf16", ("bf16", "bf16", "bf16")),
        ("--fp16", ("fp16", "fp16", "fp16")),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", ("fp16", "fp32", "fp32")),
    ],
)
def test_the_dtype_of_every_role(megatron: Imports, more: str, dtypes: tuple[str, ...]) -> None:
    precision = megatron(small(more)).job.plan.mathematics.precision
    assert (precision.parameters, precision.gradients, precision.reduction) == dtypes
    assert precision.master == "fp32"
    if "fp16" in more:
        assert (precision.loss_scaling, precision.loss_scale) == ("dynamic", 2.0**32)
        assert precision.loss_scale_hysteresis == 2


def test_the_loss_scale(megatron: Imports) -> None:
    more = "--fp16 --initial-loss-scale 65536 --loss-scale-window 200 --hysteresis 1"
    precision = megatron(small(more)).job.plan.mathematics.precision
    assert (precision.loss_scale, precision.loss_scale_window) == (65536.0, 200)
    precision = megatron(small("--fp16 --loss-scale 512")).job.plan.mathematics.precision
    assert (precision.loss_scaling, precision.loss_scale) == ("fixed", 512.0)
    assert [rule for rule, _ in megatron.refused(small("--fp16 --bf16"))] == ["import-conflict"]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (
            "--optimizer sgd --sgd-momentum 0.8 --clip-grad 0",
            {"kind": "sgd", "momentum": 0.8, "clip_norm": None},
        ),
        ("--adam-beta1 0.8 --adam-eps 1e-6", {"kind": "adamw", "beta1": 0.8, "eps": 1e-6}),
        (
            "--lr-decay-style cosine --min-lr 3e-5 --lr-warmup-iters 10 --lr-decay-iters 100",
            {"schedule": "cosine", "final_ratio": 0.1, "warmup_steps": 10},
        ),
        ("--lr-warmup-fraction 0.1", {"warmup_steps": 10}),
        ("--lr-warmup-samples 40", {"warmup_steps": 5}),
        ("--lr-decay-style constant", {"schedule": "constant"}),
        (
            "--lr-decay-style WSD --lr-wsd-decay-iters 20 --lr-wsd-decay-style linear",
            {"schedule": "wsd", "decay_steps": 20},
        ),
        (
            "--optimizer muon --muon-extra-scale-factor 0.2 --muon-use-nesterov "
            "--muon-num-ns-steps 6 --muon-momentum 0.95",
            {"kind": "muon", "momentum": 0.95, "newton_schulz_steps": 6},
        ),
    ],
)
def test_optimizer_and_schedule(megatron: Imports, more: str, expected: dict[str, Any]) -> None:
    optimizer = megatron(small(more)).job.plan.mathematics.optimizer
    assert {name: getattr(optimizer, name) for name in expected} == pytest.approx(expected)
