"""Bugs inside of attention: sinks, caps of logits, kinds of layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.core.plan import Plan
from echelon.models.attention.interface import HeadSinks, OnlineSoftmax
from echelon.parallel import vocabulary
from echelon.parallel.context.attention import ContextAttention
from tests.proof.layouts import Changes
from tests.proof.mutants.planting import Told, mutant

SINKS: Changes = {"sinks": True}
KINDS: Changes = {"window": 3, "layer_kinds": ("local", "global")}
RING: Changes = {"mesh": {"cp": 2}, "context": {"kind": "ring"}, "accumulation": 2}
ULYSSES: Changes = {**RING, "context": {"kind": "ulysses", "ulysses_degree": 2}}
SINK = "layers.1.attention.sinks.weight"


FIRST_LOSS = "loss of dp 0 microbatch 0"


def _told(rule: str, tensor: str, factor: str, plan: Changes) -> Told:
    return Told(rule, tensor, factor, plan=plan)


@mutant(
    _told("prove-gradients", SINK, "sign", {"dp": 2, "model": SINKS}),
    _told("prove-gradients", SINK, "sign", {**RING, "model": SINKS}),
)
def gradients_of_sinks_have_the_wrong_sign(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Let a sink fall where it should rise."""
    right = HeadSinks.backward

    def turned(self: HeadSinks, dout: Any, out: Any, lse: Any) -> None:
        right(replace(self, add=lambda weight, found: self.add(weight, -found)), dout, out, lse)

    patch.setattr(HeadSinks, "backward", turned)


@mutant(_told("prove-gradients", SINK, "none", {**ULYSSES, "model": SINKS}))
def gradients_of_sinks_are_those_of_the_first_heads(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Give on the gradients of the heads of every member as those of the first."""
    right = HeadSinks.backward

    def first(self: HeadSinks, dout: Any, out: Any, lse: Any) -> None:
        def moved(weight: Any, found: torch.Tensor) -> None:
            self.add(weight, found.roll(-self.heads.start))

        right(replace(self, add=moved), dout, out, lse)

    patch.setattr(HeadSinks, "backward", first)


@mutant(
    _told("prove-activations", "layers.0.attention", "none", {"dp": 2, "model": SINKS}),
    _told("prove-activations", "layers.0.attention", "none", {**RING, "model": SINKS}),
)
def sinks_take_nothing(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Leave sinks out of the softmax."""
    patch.setattr(OnlineSoftmax, "add_sinks", lambda self, sinks_H: None)


@mutant(
    _told("prove-microbatch-loss", FIRST_LOSS, "none", {"dp": 2, "model": {"final_soft_cap": 0.5}})
)
def logits_have_no_cap(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Take logits as they are."""
    patch.setattr(vocabulary.VocabularyHead, "_cap", None)


@mutant(
    _told("prove-activations", "layers.0.attention", "slice", {"dp": 2, "model": KINDS}),
    _told("prove-activations", "layers.0.attention", "slice", {**RING, "model": KINDS}),
)
def local_and_global_blocks_are_swapped(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Give blocks with a window all keys, and the others the window."""
    right, window = ContextAttention.attend, plan.model.window

    def swapped(self: Any, q: Any, k: Any, v: Any, shape: Any, batch: Any, **rest: Any) -> Any:
        other = replace(shape, window=None if shape.window else window)
        return right(self, q, k, v, other, batch, **rest)

    patch.setattr(ContextAttention, "attend", swapped)
