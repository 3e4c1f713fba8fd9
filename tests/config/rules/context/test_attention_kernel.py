"""The kernel of attention that is asked for takes the run, or is refused with the arithmetic."""

from __future__ import annotations

import pytest

from echelon.config.load import load_job
from echelon.layout.context_work import attention_kernel_text
from tests.config.problems import problems_of

GPU = "cluster.preset=8xh100"
BF16 = "precision.parameters=bf16"
FP32 = "precision.parameters=fp32"


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ((BF16,), "it runs on nccl, and the cluster is gloo"),
        ((GPU, FP32), "it takes bf16 or fp16, and parameters are fp32"),
        ((GPU, BF16, "model.head_dim=36"), "head_dim is 36 (36 % 8 = 4)"),
        ((GPU, BF16, "model.head_dim=264"), "heads of up to 256 elements, and head_dim is 264"),
        ((GPU, BF16, "model.soft_cap=30"), "it has no cap on scores"),
    ],
)
def test_what_a_kernel_does_not_take_is_refused(sets: tuple[str, ...], said: str) -> None:
    found = problems_of("nano", ["context.attention=flash", *sets])
    problem = found["attention-kernel-takes"]
    assert said in problem.message
    assert problem.suggestions
    for works in problem.suggestions:
        again = works.replace('"', "").replace(" ", "")
        assert "attention-kernel-takes" not in problems_of("nano", [again, *sets])


def test_kernels_differ_in_the_heads_that_they_take() -> None:
    wide = [GPU, BF16, "model.head_dim=192"]
    assert problems_of("nano", [*wide, "context.attention=flash"]) == {}
    assert problems_of("nano", [*wide, "context.attention=flash-3"]) == {}
    found = problems_of("nano", [*wide, "context.attention=cudnn"])["attention-kernel-takes"]
    assert found.suggestions == (
        *('context.attention = "auto"', 'context.attention = "flash"'),
        *('context.attention = "flash-3"', 'context.attention = "plain"'),
    )


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ((), "for a CPU"),
        (
            (GPU, BF16),
            "cudnn for full and causal squares, flash for windows and documents; flash-3",
        ),
        ((GPU, BF16, "context.attention=flash"), "flash: any window"),
        (("cluster.preset=8xa100-80gb", BF16), "flash: any window"),
        (("cluster.preset=8xmi300x", BF16), "flash, flash-3"),
        ((GPU, FP32), "memory-efficient"),
        ((GPU, BF16, "model.soft_cap=30"), "plain"),
        ((GPU, BF16, "model.head_dim=36"), "plain"),
        ((GPU, BF16, "context.attention=cudnn"), "cudnn: full and causal squares"),
    ],
)
def test_a_plan_says_which_kernel_attends(sets: tuple[str, ...], said: str) -> None:
    assert said in attention_kernel_text(load_job("nano", sets).plan)
