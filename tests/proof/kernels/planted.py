"""Bugs in kernels of the pieces between products, and in what calls them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.core.choices.kernels import Kernels
from echelon.core.plan import Plan
from echelon.parallel.kernels import piece_formulas, piece_operators
from tests.proof.layouts import layout
from tests.proof.mutants.planting import Told, mutant

FUSED = Kernels(provider="triton", fused=("norm", "residual", "rotary", "swiglu", "loss"))


def fused(**chosen: Any) -> Plan:
    """Return a plan with a kernel for every piece; on a CPU each is its formula."""
    plan = layout(**chosen)
    return replace(plan, layout=replace(plan.layout, kernels=FUSED))


def _told(rule: str, tensor: str, factor: str, axis: str = "", **plan: Any) -> Told:
    return Told(rule, tensor, factor, axis, plan=plan, of=fused)


@mutant(_told("prove-gradients", "norm.weight", "rows missing"))
def last_partial_sum_left_out(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Add up all partial sums of the gradient of a norm's weight but the last."""
    patch.setattr(piece_operators, "total", lambda sums: sums[:-1].sum(0))


@mutant(_told("prove-gradients", "layers.1.attention_norm", "slice"))
def heads_turned_forwards_in_backward(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Turn gradients of queries and keys the way that these were turned."""
    right = piece_formulas.heads_backward

    def wrong(gradients: Any, tables: Any, normed: Any, *, whole: bool) -> Any:
        cos, sin = tables
        return right(gradients, (cos, -sin), normed, whole=whole)

    patch.setattr(piece_formulas, "heads_backward", wrong)


@mutant(_told("prove-gradients", "layers.1.attention", "none"))
def way_around_the_branch_lost_in_backward(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Leave out the gradient of the stream that comes around a branch."""
    right = piece_formulas.norm_backward

    def wrong(
        dy: torch.Tensor,
        x: torch.Tensor,
        inverse: torch.Tensor,
        weight: Any,
        around: Any,
        **rest: Any,
    ) -> Any:
        return right(dy, x, inverse, weight, None, **rest)

    patch.setattr(piece_formulas, "norm_backward", wrong)


@mutant(_told("prove-activations", "layers.0.mlp_norm", "none"))
def norm_of_what_was_there_before_the_sum(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Norm the stream as it was before the output of a branch was added."""
    right = piece_formulas.add_norm

    def wrong(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
        return right(x, y, weight, eps)[0], *piece_formulas.norm(x, weight, eps)

    patch.setattr(piece_formulas, "add_norm", wrong)
