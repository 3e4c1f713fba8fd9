"""Bugs in scales of whole tensors in 8 bits, and in what they look back on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.core.plan import Plan
from echelon.parallel import tensor
from echelon.parallel.fp8_scales import GRADIENTS, INPUTS, TensorScales
from echelon.parallel.transport.collectives import Group, Pending
from tests.proof.layouts import Changes
from tests.proof.mutants.planting import Told, mutant

TENSOR: Changes = {
    "precision": {
        "matmul": "fp8",
        "fp8_block": 8,
        "fp8_scales": "tensor",
        "fp8_history": 1,
        "fp8_gradients": "e5m2",
    }
}
DP: Changes = {**TENSOR, "dp": 2}


@mutant(Told("prove-activations", "layers.0.attention", "slice", step=1, plan=TENSOR))
def history_of_a_step_before(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Look back on the step before the last one."""
    find, begin = TensorScales._find_scales, TensorScales.__init__

    def longer(self: TensorScales, *made_of: Any) -> None:
        begin(self, *made_of)
        self._num_steps += 1

    def late(self: TensorScales) -> None:
        history, self._history = self._history, self._history[:-1]
        find(self)
        self._history = history

    patch.setattr(TensorScales, "__init__", longer)
    patch.setattr(TensorScales, "_find_scales", late)


@mutant(Told("prove-activations", "layers.0.attention", "slice", "dp", step=1, plan=DP))
def largest_number_of_one_rank(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Let each rank look back on its own numbers."""
    shared = Group.all_reduce

    def alone(self: Group, tensor: torch.Tensor, **how: Any) -> Pending:
        return shared(self, tensor.clone() if how.get("op") == "max" else tensor, **how)

    patch.setattr(Group, "all_reduce", alone)


@mutant(Told("prove-activations", "layers.0.attention", "none", step=1, plan=TENSOR))
def scale_of_another_tensor(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Take the scale of the gradient of a layer for its input."""
    scale = TensorScales.scale

    def other(self: TensorScales, kind: int, linears: Any) -> torch.Tensor | None:
        return scale(self, GRADIENTS if kind == INPUTS else kind, linears)

    patch.setattr(TensorScales, "scale", other)


@mutant(Told("prove-gradients", "layers.1.mlp_norm", "none", plan=TENSOR))
def gradients_in_e4m3(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Round gradients to the format of all else."""
    patch.setattr(tensor, "E5M2", torch.float8_e4m3fn)
