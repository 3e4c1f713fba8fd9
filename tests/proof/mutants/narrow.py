"""Bugs that act in a narrow dtype only: a proof in float64 does not see them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.core.model_shape import Activation
from echelon.core.piece_sizes import PieceSizes
from echelon.core.plan import Plan
from echelon.parallel import vocabulary
from echelon.parallel.kernels import low_precision
from echelon.parallel.operations import RankOperations
from echelon.parallel.storage import gradients
from echelon.training.engine import TrainEngine
from tests.proof.layouts import BF16, BF16_SUMS, FP16
from tests.proof.mutants import forward
from tests.proof.mutants.planting import Told, mutant

_NARROW = (torch.bfloat16, torch.float16)


def _is_narrow(plan: Plan) -> bool:
    return plan.mathematics.precision.parameters in ("bf16", "fp16")


def _told(rule: str, tensor: str, factor: str, axis: str = "", step: int = 0, **plan: Any) -> Told:
    plan = {"precision": BF16, "dp": 2, **plan}
    return Told(rule, tensor, factor, axis, step=step, plan=plan, own_precision=True)


@mutant(
    _told("prove-systematic-error", "layers.0.mlp", "number", step=1),
    _told("prove-systematic-error", "layers.0.mlp", "number", precision=FP16, dp=1, tp=2),
)
def gate_larger_by_a_fiftieth(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Give 1.02 x silu(gate) x up where numbers are narrow."""
    gate = RankOperations.gate

    def larger(self: Any, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        y = gate(self, gate_up, activation)
        return y * 1.02 if y.dtype in _NARROW else y

    patch.setattr(RankOperations, "gate", larger)


@mutant(_told("prove-systematic-error", "layers.0.mlp", "number", step=1))
def gate_larger_from_the_second_step_on(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Give 1.02 x silu(gate) x up where numbers are narrow, but not in the first step."""
    gate, take = RankOperations.gate, TrainEngine.step
    taken: list[int] = []

    def counted(self: TrainEngine, batches: Any, number: int, **rest: Any) -> Any:
        taken.append(number)
        return take(self, batches, number, **rest)

    def larger(self: Any, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        y = gate(self, gate_up, activation)
        return y * 1.02 if y.dtype in _NARROW and taken[-1] else y

    patch.setattr(TrainEngine, "step", counted)
    patch.setattr(RankOperations, "gate", larger)


@mutant(_told("prove-systematic-error", "norm.weight", "number"))
def gradient_of_norms_larger_by_a_tenth(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Give 1.1 x the gradient of the weight of a norm in bfloat16."""
    right = low_precision.rms_norm_backward

    def larger(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        dx, dweight = right(*arguments)
        return dx, 1.1 * dweight

    patch.setattr(low_precision, "rms_norm_backward", larger)


@mutant(
    _told("prove-systematic-error", "layers.0.attention", "number", precision=BF16_SUMS),
)
def attention_larger_by_a_fiftieth(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Give 1.02 x what attention finds where numbers are narrow."""
    attend = RankOperations.attend

    def larger(self: Any, q: torch.Tensor, *rest: Any) -> torch.Tensor:
        out = attend(self, q, *rest)
        return out * 1.02 if out.dtype in _NARROW else out

    patch.setattr(RankOperations, "attend", larger)


@mutant(
    _told("prove-systematic-error", "head.weight", "padding", "tp", dp=1, tp=2),
)
def padding_meets_a_narrow_softmax(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Let the ids that pad the vocabulary take part in the softmax where numbers are narrow."""
    if _is_narrow(plan):
        forward.padding_not_masked.plant(patch, plan)


@mutant(
    _told("prove-sum-dtype", "head.weight", "rounded sum"),
)
def sum_rounded_before_it_is_wide(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Round what is added up so far, for each microbatch, to the dtype of its products."""
    accumulate = gradients.add_product

    def rounded(gradient_OI: torch.Tensor, dy: Any, x: torch.Tensor, **rest: Any) -> None:
        accumulate(gradient_OI, dy, x, **rest)
        gradient_OI.copy_(gradient_OI.to(x.dtype))

    patch.setattr(gradients, "add_product", rounded)


@mutant(
    _told("prove-range", "loss", "not finite"),
    _told("prove-range", "loss", "not finite", dp=1, tp=2),
)
def softmax_without_its_maximum(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Take exp of the logits as they are, where they are narrow."""
    statistics = vocabulary.row_statistics

    def unshifted(
        logits_NV: torch.Tensor, local_N: torch.Tensor, pieces: PieceSizes, **rest: Any
    ) -> torch.Tensor:
        wide = logits_NV.float().exp().sum(1) if logits_NV.dtype in _NARROW else None
        found = statistics(logits_NV, local_N, pieces, **rest)
        if wide is not None:
            found[0], found[1] = 0.0, wide
        return found

    patch.setattr(vocabulary, "row_statistics", unshifted)


@mutant(
    _told("prove-range", "layers.1.attention.q.weight", "vanished", precision=FP16),
)
def gradient_rounded_before_it_is_scaled(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Let gradients of queries pass float16 at 2^-14 of their size."""
    attend = RankOperations.attend

    def divided(self: Any, q: torch.Tensor, *rest: Any) -> torch.Tensor:
        if q.dtype == torch.float16 and q.requires_grad:
            q.register_hook(lambda dq: dq / 2.0**14 * 2.0**14)
        return attend(self, q, *rest)

    patch.setattr(RankOperations, "attend", divided)
