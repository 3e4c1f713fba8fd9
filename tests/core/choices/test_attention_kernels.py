"""What each kernel of attention takes, and what is said of a run that it does not take."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from echelon.core.choices.kernels import (
    ATTENTION_KERNELS,
    AttendedRun,
    AttentionKernel,
    cudnn_takes_squares,
    kernel_text,
    misfits,
)

RUN = AttendedRun(backend="nccl", dtype="bf16", head_dim=128, soft_cap=False)


def test_every_name_but_auto_is_a_kernel() -> None:
    assert get_args(AttentionKernel) == ("auto", *ATTENTION_KERNELS)


def test_every_kernel_takes_an_ordinary_run() -> None:
    assert not any(misfits(name, RUN) for name in ATTENTION_KERNELS)


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({"backend": "gloo"}, {"plain"}),
        ({"dtype": "fp32"}, {"plain"}),
        ({"dtype": "fp16"}, {"flash", "flash-3", "cudnn", "plain"}),
        ({"head_dim": 256}, {"flash", "flash-3", "plain"}),
        ({"head_dim": 264}, {"plain"}),
        ({"head_dim": 60}, {"plain"}),
        ({"soft_cap": True}, {"plain"}),
    ],
)
def test_who_takes_what(changes: dict[str, object], taken: set[str]) -> None:
    run = replace(RUN, **changes)  # type: ignore[arg-type]
    assert {name for name in ATTENTION_KERNELS if not misfits(name, run)} == taken


def test_each_reason_has_its_numbers() -> None:
    run = AttendedRun(backend="gloo", dtype="fp32", head_dim=132, soft_cap=True)
    assert misfits("cudnn", run) == (
        "it runs on nccl, and the cluster is gloo",
        "it takes bf16 or fp16, and parameters are fp32",
        "it takes heads of a multiple of 8 elements, and head_dim is 132 (132 % 8 = 4)",
        "it takes heads of up to 128 elements, and head_dim is 132",
        "it has no cap on scores, and the model has one",
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "flash, flash-3"),
        ({"capability": 8.0}, "flash: any window"),
        ({"capability": 9.0}, "cudnn for full and causal squares, flash for windows"),
        ({"capability": 10.3}, "cudnn for full and causal squares, flash for windows"),
        ({"capability": 12.0}, "flash: any window"),
        ({"capability": 9.0, "head_dim": 256}, "flash, flash-3"),
        ({"capability": 9.0, "dtype": "fp32"}, "memory-efficient"),
        ({"backend": "gloo"}, "flash attention of PyTorch for a CPU"),
        ({"backend": "gloo", "soft_cap": True}, "plain"),
        ({"dtype": "fp32"}, "memory-efficient"),
        ({"dtype": "fp64"}, "plain"),
        ({"head_dim": 60}, "plain"),
        ({"head_dim": 512}, "memory-efficient"),
    ],
)
def test_auto_says_what_it_is(changes: dict[str, object], said: str) -> None:
    run = replace(RUN, **changes)  # type: ignore[arg-type]
    assert kernel_text("auto", run).startswith(said)
    assert kernel_text("plain", RUN).startswith("plain: ")


def test_only_hopper_has_the_third_flash_attention() -> None:
    third = {
        capability: "flash-3" in kernel_text("auto", replace(RUN, capability=capability))
        for capability in (0.0, 8.0, 9.0, 10.0)
    }
    assert third == {0.0: True, 8.0: False, 9.0: True, 10.0: False}


@pytest.mark.parametrize(
    ("kernel", "capability", "head_dim", "taken"),
    [
        ("auto", 9.0, 128, True),
        ("auto", 10.3, 64, True),
        ("auto", 8.9, 128, False),
        ("auto", 0.0, 128, False),
        ("auto", 9.0, 136, False),
        ("flash", 9.0, 128, False),
        ("flash-3", 9.0, 128, False),
        ("cudnn", 8.0, 128, True),
    ],
)
def test_who_gives_squares_to_cudnn(
    kernel: AttentionKernel, capability: float, head_dim: int, taken: bool
) -> None:
    assert cudnn_takes_squares(kernel, capability, head_dim) is taken
