"""What computes the numbers of a step on a GPU, proven on one rank against the CPU.

Kernels in Triton, what PyTorch's compiler makes, products in 8 bits, each kernel of attention with
the masks that it takes, experts in grouped products, operators that run again in backward. The
rank talks over NCCL. Plans are proven in float64, which kernels of few digits leave to plain
products, and then in their own precision, where a GPU computes as a user's run does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.core.choices.kernels import FusedPiece, KernelProvider, Kernels
from echelon.core.model_shape import ModelShape
from echelon.core.plan import Plan, Recompute
from echelon.launch.local.supervisor import RankPool
from echelon.proof.run import prove
from tests.parallel.layouts import DEEPSEEK, MIXTRAL, plan_of
from tests.proof.layouts import BF16, BF16_SUMS, FP16, layout

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(600),
]
SUBJECT = "tests.cuda.on_gpu:build"
FUSED: tuple[FusedPiece, ...] = ("norm", "residual", "rotary", "swiglu", "loss", "update")
WIDE = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 384, "vocab": 257}
"""Widths that every kernel takes: heads of 64, and blocks of 128 for scales in 8 bits."""

AGAIN = Recompute(policy="selective", operators=("norm", "mlp", "attention"))


@pytest.fixture(scope="module")
def nccl_rank() -> Iterator[RankPool]:
    """Yield a pool of one rank that has the GPU for itself."""
    with RankPool(1, backend="nccl") as pool:
        yield pool


def _with(plan: Plan, provider: KernelProvider = "plain", **changed: Any) -> Plan:
    """Return a plan with kernels for the pieces, and other parts of its layout."""
    kernels = Kernels(provider=provider, fused=() if provider == "plain" else FUSED)
    return replace(plan, layout=replace(plan.layout, kernels=kernels, **changed))


def _attended(kernel: str, precision: Any = BF16, **model: Any) -> Plan:
    plan = layout(model={**WIDE, **model}, precision=precision)
    context = replace(plan.layout.context, attention=kernel)
    return replace(plan, layout=replace(plan.layout, context=context))


def _packed(kernel: str) -> Plan:
    plan = _attended(kernel)
    return replace(plan, mathematics=replace(plan.mathematics, documents="separate"))


def _fp8(**changed: Any) -> Plan:
    return layout(model=WIDE, precision={**BF16, "matmul": "fp8", **changed})


def _experts(shape: ModelShape) -> Plan:
    """Return a plan with experts that are wide enough for grouped products."""
    assert shape.experts is not None
    width = {"hidden": 128, "heads": 4, "kv_heads": 4, "head_dim": 32, "ffn": 192}
    wide = replace(shape, **width, experts=replace(shape.experts, ffn=64))
    return _with(plan_of(model=wide, dtype="bf16"), "triton")


PLANS = {
    "plain": layout(model=WIDE, precision=BF16),
    "triton": _with(layout(model=WIDE, precision=BF16), "triton"),
    "triton, fp16": _with(layout(model=WIDE, precision=FP16), "triton"),
    "triton, sums in bf16": _with(layout(model=WIDE, precision=BF16_SUMS), "triton"),
    "triton, zero 3": _with(layout(model=WIDE, precision=BF16, zero={"stage": 3}), "triton"),
    "triton, norms of heads": _with(
        layout(model={**WIDE, "qk_norm": True}, precision=BF16), "triton"
    ),
    "triton, operators again": _with(layout(model=WIDE, precision=BF16), "triton", recompute=AGAIN),
    "compiled": _with(layout(model=WIDE, precision=BF16), "compiled"),
    "fp8 in blocks": _fp8(),
    "fp8 of tensors": _fp8(fp8_scales="tensor", fp8_gradients="e5m2"),
    "fp8, triton": _with(_fp8(), "triton"),
    "flash": _attended("flash"),
    "flash, a window": _attended("flash", window=5),
    "flash, documents": _packed("flash"),
    "cudnn": _attended("cudnn"),
    "cudnn, a window": _attended("cudnn", window=5),
    "auto": _attended("auto"),
    "auto, documents": _packed("auto"),
    "efficient, float32": _attended("auto", precision={}),
    "plain attention": _attended("plain"),
    "Mixtral": _experts(MIXTRAL),
    "DeepSeek": _experts(DEEPSEEK),
}


@pytest.mark.parametrize("name", PLANS)
def test_what_a_gpu_computes_is_proven(name: str, nccl_rank: RankPool) -> None:
    proof = prove(PLANS[name], run_ranks=nccl_rank.run, subject=SUBJECT, own_precision=True)
    assert proof.proven, proof.diagnosis
