# SPDX-License-Identifier: Apache-2.0
"""The update of parameters as one kernel, in Triton: AdamW, and SGD with momentum.

An element's gradient is read in its own dtype, times a factor (of clipping, of the loss scale);
master copy and state are read and written once, and the parameter that they are published as is
written: 28 bytes for each parameter of bf16 with a gradient of bf16 and a master copy in fp32.
PyTorch's own fused update wants a gradient as wide as the master copy, and leaves its cast, and
that of the parameters, to passes of their own: 40 bytes.

Each element is computed by itself, in float32 and in one order: sums of products are `fma`, roots
and quotients are rounded to the nearest. So no result depends on how a bucket is cut.

Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019; Sutskever et al., "On
the importance of initialization and momentum", 2013.
Shape suffix: N elements.
"""

# Triton reads what a parameter is annotated with, in a module that no type checker sees.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

triton: Any = import_module("triton")
tl: Any = import_module("triton.language")

ELEMENTS = 1024
"""Elements of a program."""

WARPS = 4
"""Warps of a program, 32 threads each: eight elements for each thread."""


@triton.jit
def adamw_kernel(
    target_N,
    gradient_N,
    mean_N,
    square_N,
    values_N,
    count,
    factor,
    kept,
    blend,
    kept_square,
    blend_square,
    step,
    correction,
    eps,
    PUBLISHES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    gradient = tl.load(gradient_N + place, mask=inside, other=0.0).to(tl.float32) * factor
    mean = tl.load(mean_N + place, mask=inside, other=0.0)
    square = tl.load(square_N + place, mask=inside, other=0.0)
    target = tl.load(target_N + place, mask=inside, other=0.0)
    mean = tl.fma(gradient - mean, blend, mean)
    square = tl.fma(gradient * blend_square, gradient, square * kept_square)
    root = tl.fma(tl.sqrt_rn(square), correction, eps)
    target = tl.fma(tl.div_rn(mean, root), -step, target * kept)
    tl.store(mean_N + place, mean, mask=inside)
    tl.store(square_N + place, square, mask=inside)
    tl.store(target_N + place, target, mask=inside)
    if PUBLISHES:
        tl.store(values_N + place, target.to(values_N.dtype.element_ty), mask=inside)


@triton.jit
def sgd_kernel(
    target_N,
    gradient_N,
    momentum_N,
    values_N,
    count,
    factor,
    decay,
    momentum,
    rate,
    REMEMBERS: tl.constexpr,
    PUBLISHES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    step = tl.load(gradient_N + place, mask=inside, other=0.0).to(tl.float32) * factor
    target = tl.load(target_N + place, mask=inside, other=0.0)
    step = tl.fma(target, decay, step)
    if REMEMBERS:
        step = tl.fma(tl.load(momentum_N + place, mask=inside, other=0.0), momentum, step)
        tl.store(momentum_N + place, step, mask=inside)
    target = tl.fma(step, -rate, target)
    tl.store(target_N + place, target, mask=inside)
    if PUBLISHES:
        tl.store(values_N + place, target.to(values_N.dtype.element_ty), mask=inside)


def adamw(
    target_N: torch.Tensor,
    gradient_N: torch.Tensor,
    state: Sequence[torch.Tensor],
    values_N: torch.Tensor | None,
    numbers: Sequence[float],
    count: int,
) -> None:
    """Update a float32 target and both moments in place, and write it to `values_N`, rounded.

    `numbers` are beta1, beta2, eps, the learning rate, the factor of gradients and weight decay; it
    is update number `count` of all. What is the same for all elements is computed in float64 and
    rounded once.
    """
    beta1, beta2, eps, rate, factor, weight_decay = numbers
    adamw_kernel[_grid(target_N)](
        *(target_N, gradient_N, *state, target_N if values_N is None else values_N),
        *(target_N.numel(), factor, 1.0 - rate * weight_decay),
        *(1.0 - beta1, beta2, 1.0 - beta2),
        *(rate / (1.0 - beta1**count), (1.0 - beta2**count) ** -0.5, eps),
        PUBLISHES=values_N is not None,
        BLOCK=ELEMENTS,
        num_warps=WARPS,
    )


def sgd(
    target_N: torch.Tensor,
    gradient_N: torch.Tensor,
    state: Sequence[torch.Tensor],
    values_N: torch.Tensor | None,
    numbers: Sequence[float],
) -> None:
    """Update a float32 target and its momentum in place, and write it to `values_N`, rounded.

    `numbers` are the decay of the momentum, the learning rate, the factor of gradients and weight
    decay; where the momentum does not last there is none to read.
    """
    momentum, rate, factor, weight_decay = numbers
    sgd_kernel[_grid(target_N)](
        *(target_N, gradient_N, *state, target_N if values_N is None else values_N),
        *(target_N.numel(), factor, weight_decay, momentum, rate),
        REMEMBERS=momentum != 0.0,
        PUBLISHES=values_N is not None,
        BLOCK=ELEMENTS,
        num_warps=WARPS,
    )


def _grid(target_N: torch.Tensor) -> tuple[int]:
    assert target_N.dtype == torch.float32, "what is updated is float32"
    return (-(-target_N.numel() // ELEMENTS),)
