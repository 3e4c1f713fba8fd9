# SPDX-License-Identifier: Apache-2.0
"""Rules about what computes the pieces between products."""

from echelon.core.rules import Rule

TRITON_NEEDS_GPU = Rule(
    id="triton-needs-gpu",
    why="""
    Triton makes kernels for GPUs. On processors the same pieces are PyTorch's operations
    ("plain"), or what PyTorch's compiler makes of their formulas ("compiled", by the C++ compiler
    of the machine). A plan for GPUs is still proven on processors: there each kernel is its
    formula.
    """,
    example="""
    [cluster]
    preset = "laptop"
    [kernels]
    %s
    """,
    bad='provider = "triton"',
    fixed='provider = "compiled"',
)

RESIDUAL_NEEDS_NORM = Rule(
    id="residual-needs-norm",
    why="""
    "residual" adds a branch's output to the residual stream in the kernel of the norm that comes
    next, and in backward the gradients of both ways in the kernel of that norm: one pass over the
    stream less each. Without "norm" there is no such kernel.
    """,
    example="""
    [cluster]
    preset = "8xh100"
    [kernels]
    %s
    """,
    bad='fused = ["residual", "swiglu"]',
    fixed='fused = ["norm", "residual", "swiglu"]',
)

KERNELS_CAN_BE_MADE = Rule(
    id="kernels-can-be-made",
    why="""
    Kernels in Triton are compiled by the package `triton`, which comes with PyTorch's builds for
    CUDA. "compiled" needs it on GPUs, too, and on processors a C++ compiler. Where one is missing a
    run would fail in its first step, on every rank: it is refused before any process starts.
    """,
    bad="echelon train run.toml --set kernels.provider=compiled     # no C++ compiler is installed",
    fixed="echelon train run.toml --set kernels.provider=plain",
)
