"""The kernels that formulas count with are those that attention chooses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from echelon.core.choices.attention_kernels import AttentionKernel
from echelon.core.plan import DType, Plan
from echelon.cost.bytes.context import kernels
from echelon.models.attention.fused import FusedGpuKernel
from echelon.models.attention.local import AttentionRule, kernel_for
from echelon.models.attention.plain import PlainKernel
from echelon.models.precision import TORCH_DTYPES
from tests.parallel.layouts import NANO, plan_of


def plan_with(backend: str, dtype: DType, head_dim: int, soft_cap: float | None) -> Plan:
    plan = plan_of(model=replace(NANO, head_dim=head_dim, soft_cap=soft_cap))
    precision = replace(plan.mathematics.precision, parameters=dtype)
    return replace(
        plan,
        mathematics=replace(plan.mathematics, precision=precision),
        cluster=replace(plan.cluster, backend=backend),
    )


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [12, 32, 320])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("attention", ["auto", "plain"])
def test_the_plain_kernel_is_the_one_that_is_chosen(
    backend: str, dtype: DType, head_dim: int, soft_cap: float | None, attention: AttentionKernel
) -> None:
    plan = plan_with(backend, dtype, head_dim, soft_cap)
    context = replace(plan.layout.context, attention=attention)
    plan = replace(plan, layout=replace(plan.layout, context=context))
    device = torch.device("cpu" if backend == "gloo" else "meta")
    rule = AttentionRule(soft_cap=soft_cap, kernel=attention)
    chosen = kernel_for(device, TORCH_DTYPES[dtype], head_dim, rule)
    plain = isinstance(chosen, PlainKernel)
    assert kernels.plain_kernel_runs(plan) is plain
    flash = isinstance(chosen, FusedGpuKernel) and chosen.flash is not None
    assert kernels.flash_kernel_runs(plan) is flash
    efficient = isinstance(chosen, FusedGpuKernel) and not flash
    assert kernels.efficient_kernel_runs(plan) is efficient


def test_a_window_in_float16_has_bands_that_flash_attention_alone_takes() -> None:
    plan = plan_with("nccl", "fp16", 320, None)
    windowed = replace(
        plan, mathematics=replace(plan.mathematics, model=replace(plan.model, window=9))
    )
    assert not kernels.plain_kernel_runs(plan)
    assert kernels.plain_kernel_runs(windowed)
    narrow = replace(windowed.model, head_dim=32)
    mathematics = replace(windowed.mathematics, model=narrow)
    assert kernels.flash_kernel_runs(replace(windowed, mathematics=mathematics))
