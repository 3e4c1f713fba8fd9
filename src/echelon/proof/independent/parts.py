# SPDX-License-Identifier: Apache-2.0
"""The first part of a forward pass that the shared code computes otherwise, and how.

Both run from the same weights on the same batch and note what every part makes of it; the first
difference in the order of the forward pass is the part at fault, for all before it agrees.

Shape suffixes: B sequences, T positions, N = T * B, H heads, d a head's width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from echelon.core.model_shape import Activation, ModelShape
from echelon.core.plan import Plan
from echelon.models.batch import TokenBatch
from echelon.models.moe import MixtureOfExperts
from echelon.proof.independent import attention, decoder, mixture
from echelon.proof.independent.attention import ScoreSettings, attend
from echelon.proof.independent.fp8 import Fp8Rules
from echelon.proof.independent.mixture import RouterState
from echelon.proof.independent.sequence import (
    EMBEDDING_UNIT,
    HEAD_UNIT,
    PartKey,
    SequenceRun,
)
from echelon.proof.independent.training import ForwardPass, forward
from echelon.proof.oracle.operations import OracleOperations
from echelon.proof.oracle.oracle import OracleStep, build_decoder, token_losses
from echelon.proof.subject import ProofBatch

SAME = 1e-10
"""The relative error below which two parts are the same."""

LOSS = "cross-entropy"


@dataclass(frozen=True, slots=True)
class DifferentPart:
    """Name the part, the unit that it is in, and what is known of how it differs."""

    part: str
    unit: str
    says: str


class NotingOperations(OracleOperations):
    """The oracle's operations, which note what each of them makes of a batch."""

    def __init__(self) -> None:
        """Note nothing yet."""
        super().__init__(rounds=False)
        self.unit = EMBEDDING_UNIT
        self.parts: dict[PartKey, torch.Tensor] = {}
        self.attended: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def _note(self, part: str, y: torch.Tensor) -> torch.Tensor:
        number = sum(key[:2] == (self.unit, part) for key in self.parts)
        self.parts[self.unit, part, number] = y.detach()
        return y

    def enter(self, unit: str, x: torch.Tensor | None) -> torch.Tensor | None:
        """Note that a unit begins."""
        self.unit = unit
        return super().enter(unit, x)

    def leave(self, unit: str, y: torch.Tensor) -> torch.Tensor:
        """Note that the head may come next."""
        self.unit = HEAD_UNIT
        return super().leave(unit, y)

    def embed(
        self, weight_VD: nn.Parameter, positions: nn.Parameter | None, batch: TokenBatch
    ) -> torch.Tensor:
        """Note token vectors."""
        return self._note(decoder.EMBEDDING, super().embed(weight_VD, positions, batch))

    def norm(
        self, x: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None, eps: float
    ) -> torch.Tensor:
        """Note a norm, of a block or of heads."""
        return self._note(attention.NORM, super().norm(x, weight, bias, eps))

    def project_in(self, x_ND: torch.Tensor, linears: Sequence[nn.Linear]) -> torch.Tensor:
        """Note a projection."""
        return self._note(attention.PROJECTION, super().project_in(x_ND, linears))

    def project_alike(
        self, x_ND: torch.Tensor, linears: Sequence[nn.Linear]
    ) -> tuple[torch.Tensor, ...]:
        """Note a projection to narrow vectors."""
        found = super().project_alike(x_ND, linears)
        self._note(attention.PROJECTION, torch.cat(found, dim=-1))
        return found

    def project_out(self, x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
        """Note an output projection."""
        return self._note(decoder.OUTPUT, super().project_out(x, linear))

    def rotate(self, x: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor) -> torch.Tensor:
        """Note rotated heads."""
        return self._note(attention.ROTARY, super().rotate(x, cos_TE, sin_TE))

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        shape: ModelShape,
        batch: TokenBatch,
        *,
        sinks_H: nn.Parameter | None = None,
    ) -> torch.Tensor:
        """Note attention, and what it is computed from."""
        self.attended[self.unit] = q.detach(), k.detach(), v.detach()
        y_ND = super().attend(q, k, v, shape, batch, sinks_H=sinks_H)
        if shape.latent is None:
            return self._note(attention.ATTENTION, y_ND)
        # Values are as wide as keys here, with zeros behind them.
        width = shape.latent.value_dim
        self._note(attention.ATTENTION, y_ND.unflatten(-1, (-1, shape.head_dim))[..., :width])
        return y_ND

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Note a gated activation."""
        return self._note(decoder.GATED, super().gate(gate_up, activation))

    def activate(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Note an activation."""
        return self._note(decoder.ACTIVATION, super().activate(x, activation))

    def mixture(
        self, x_ND: torch.Tensor, mixture_of_experts: MixtureOfExperts, batch: TokenBatch
    ) -> torch.Tensor:
        """Note where tokens go, and what their experts make of them."""
        y_ND = super().mixture(x_ND, mixture_of_experts, batch)
        routed = self.routing.routed[mixture_of_experts.layer]
        self._note(mixture.SCORES, routed.scores_NE)
        self._note(mixture.CHOICE, routed.chosen_NK)
        self._note(mixture.GATES, routed.gates_NK)
        self._note(mixture.CAPACITY, routed.kept_NK)
        return self._note(mixture.EXPERTS, y_ND)

    def add(self, x_ND: torch.Tensor, y_ND: torch.Tensor) -> torch.Tensor:
        """Note the residual stream."""
        return self._note(decoder.RESIDUAL, super().add(x_ND, y_ND))

    def multiply(self, x_ND: torch.Tensor, factor: float) -> torch.Tensor:
        """Note what a factor of the model makes."""
        y_ND = super().multiply(x_ND, factor)
        return y_ND if factor == 1.0 else self._note(decoder.MULTIPLIED, y_ND)

    def dropout(
        self, x_ND: torch.Tensor, probability: float, site: str, batch: TokenBatch
    ) -> torch.Tensor:
        """Note what dropout leaves."""
        y_ND = super().dropout(x_ND, probability, site, batch)
        return self._note("dropout", y_ND) if probability else y_ND

    def logits(self, x_ND: torch.Tensor, weight_VD: nn.Parameter) -> torch.Tensor:
        """Note the logits."""
        return self._note(decoder.HEAD, super().logits(x_ND, weight_VD))

    def cap(self, logits_NV: torch.Tensor, soft_cap: float | None) -> torch.Tensor:
        """Note capped logits."""
        capped_NV = super().cap(logits_NV, soft_cap)
        return capped_NV if soft_cap is None else self._note(decoder.LOGIT_CAP, capped_NV)


def forward_from(
    plan: Plan,
    oracle: OracleStep,
    batch: ProofBatch,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> ForwardPass:
    """Return the independent forward pass of a step from the oracle's weights, or others."""
    state = RouterState(
        biases=oracle.routing.biases,
        shares={block: share.tolist() for block, share in oracle.routing.shares.items()},
    )
    fp8 = Fp8Rules.first(plan.mathematics.precision)
    if fp8 is not None:
        fp8 = replace(fp8, past=oracle.fp8_maxima.steps)
    return forward(plan, weights or oracle.before, batch, oracle.step, state, fp8)


def first_different_part(plan: Plan, oracle: OracleStep, batch: ProofBatch) -> DifferentPart | None:
    """Return the first part of the forward pass of a step that differs; None where none does."""
    noting = NotingOperations()
    model = build_decoder(
        plan, oracle.before, noting, routing=oracle.routing, rounding=oracle.rounding
    )
    with torch.no_grad():
        token_losses(plan, model, batch, oracle.step)
        runs = forward_from(plan, oracle, batch).runs
    for key in runs[0].parts:
        unit, part, _ = key
        right = torch.stack([run.parts[key] for run in runs], dim=1)
        if key not in noting.parts:
            return DifferentPart(part, unit, "the shared code leaves it out")
        found = noting.parts[key].reshape(right.shape)
        error = relative_difference(found, right)
        if not error <= SAME:
            named = part if part != attention.ATTENTION else _of_attention(runs, noting, unit)
            return DifferentPart(named, unit, f"off by {error:.2g}; all before it agrees")
    return None


def relative_difference(found: torch.Tensor, right: torch.Tensor) -> float:
    """Return the length of the difference over that of the right one."""
    scale = float(right.double().norm())
    error = float((found.double() - right.double()).norm())
    return error / scale if scale else error


def _of_attention(runs: Sequence[SequenceRun], noting: NotingOperations, unit: str) -> str:
    """Return which part of attention, changed, makes of q, k and v what the shared code made."""
    found = noting.parts[unit, attention.ATTENTION, 0]
    q, k, v = noting.attended[unit]
    latent = runs[0].model.latent
    width = v.shape[-1] if latent is None else latent.value_dim
    for part, changed in _other_settings([ScoreSettings.of(run, unit) for run in runs]):
        outs = [
            attend(q[:, b], k[:, b], v[:, b, :, :width], settings)
            for b, settings in enumerate(changed)
        ]
        if relative_difference(found, torch.stack(outs, dim=1).reshape(found.shape)) <= SAME:
            return part
    return attention.ATTENTION


def _other_settings(
    settings: Sequence[ScoreSettings],
) -> Iterator[tuple[str, list[ScoreSettings]]]:
    """Yield wrong settings of the attention of all sequences, by the part that is wrong then."""
    first = settings[0]
    if first.other_window != first.window:
        yield "kind of layer", [replace(one, window=one.other_window) for one in settings]
    if first.window is not None:
        for window in (first.window + 1, first.window - 1, None):
            if window != 0:
                yield "window", [replace(one, window=window) for one in settings]
    if first.soft_cap is not None:
        yield "soft cap", [replace(one, soft_cap=None) for one in settings]
    if first.sinks is not None:
        yield "sinks", [replace(one, sinks=None) for one in settings]
    yield "causal mask", [replace(one, causal=not one.causal) for one in settings]
    if any(len(one.documents) > 1 for one in settings):
        yield "document starts", [replace(one, documents=(0,)) for one in settings]
    for scale in (1.0, first.head_dim**-0.5):
        if not math.isclose(scale, first.scale):
            yield "scale of scores", [replace(one, scale=scale) for one in settings]
