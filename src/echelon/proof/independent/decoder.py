# SPDX-License-Identifier: Apache-2.0
"""A decoder as a function of one sequence: embedding, pre-norm blocks, final norm, cross-entropy.

Touvron et al., "Llama", 2023, section 2.2, and Radford et al., "GPT-2", 2019, section 2.3; GELU is
the tanh form of Hendrycks and Gimpel, 2016.

Shape suffixes: T positions, D hidden, V vocabulary.
"""

from __future__ import annotations

import math

import torch

from echelon.proof.independent.attention import (
    NORM,
    PROJECTION,
    grouped_attention,
    latent_attention,
)
from echelon.proof.independent.mixture import EXPERTS, mix, route
from echelon.proof.independent.sequence import (
    HEAD_UNIT,
    SequenceRun,
    layer_norm,
    root_mean_square_norm,
)
from echelon.proof.independent.weights import has_experts

EMBEDDING = "embedding"
OUTPUT = "output projection"
GATED = "gate of the MLP"
ACTIVATION = "activation"
RESIDUAL = "residual sum"
MULTIPLIED = "multiplier"
HEAD = "head"
LOGIT_CAP = "soft cap of logits"


def token_losses(run: SequenceRun, labels: list[int]) -> torch.Tensor:
    """Return -log p(label) of every position, [T]; 0 where the label is -100."""
    x_TD = hidden(run)
    run.unit = HEAD_UNIT
    head = "embedding.weight" if run.model.tied else "head.weight"
    logits_TV = run.note(HEAD, _normed(run, x_TD, "norm") @ run.weights[head].T)
    logits_TV = _multiplied(run, logits_TV, run.model.multipliers.logits)
    cap = run.model.final_soft_cap
    if cap is not None:
        logits_TV = run.note(LOGIT_CAP, cap * torch.tanh(logits_TV / cap))
    losses: list[torch.Tensor] = []
    for row_V, label in zip(logits_TV, labels, strict=True):
        counted = label != -100
        loss = torch.logsumexp(row_V, dim=0) - row_V[label if counted else 0]
        losses.append(loss if counted else loss * 0.0)
    return torch.stack(losses)


def hidden(run: SequenceRun) -> torch.Tensor:
    """Return the residual stream after all blocks, [T, D]."""
    x_TD = run.weights["embedding.weight"][run.tokens]
    if run.model.positions == "learned":
        x_TD = x_TD + run.weights["positions.weight"][: len(run.tokens)]
    x_TD = _multiplied(run, run.note(EMBEDDING, x_TD), run.model.multipliers.embedding)
    x_TD = run.dropped_out(x_TD, "embedding")
    for block in range(run.model.layers):
        run.unit = f"layers.{block}"
        x_TD = _block(run, block, x_TD)
    return x_TD


def _block(run: SequenceRun, block: int, x_TD: torch.Tensor) -> torch.Tensor:
    """Return the stream after a block: GPT-J's sum of both branches (2021), or one after the other.

    A norm stands before a branch (GPT-2), after it (OLMo 2, 2024), or on both sides (GLM 4, 2025).
    """
    normed = _before(run, x_TD, "attention_norm")
    y_TD = _attended(run, normed)
    if run.model.residual == "sequential":
        x_TD = run.note(RESIDUAL, x_TD + y_TD)
        return run.note(RESIDUAL, x_TD + _fed_forward(run, block, _before(run, x_TD, "mlp_norm")))
    both = run.note(RESIDUAL, x_TD + y_TD)
    if run.model.residual == "parallel":
        normed = _before(run, x_TD, "mlp_norm")
    return run.note(RESIDUAL, both + _fed_forward(run, block, normed))


def _before(run: SequenceRun, x_TD: torch.Tensor, name: str) -> torch.Tensor:
    return x_TD if run.model.norm_place == "after" else _normed(run, x_TD, f"{run.unit}.{name}")


def _after(run: SequenceRun, y_TD: torch.Tensor, branch: str) -> torch.Tensor:
    if run.model.norm_place != "before":
        y_TD = _normed(run, y_TD, f"{run.unit}.{branch}_post_norm")
    y_TD = _multiplied(run, y_TD, run.model.multipliers.residual)
    return run.dropped_out(y_TD, f"{run.unit}.{branch}")


def _attended(run: SequenceRun, x_TD: torch.Tensor) -> torch.Tensor:
    latent = run.model.latent
    y_TD = grouped_attention(run, x_TD) if latent is None else latent_attention(run, latent, x_TD)
    return _after(run, run.note(OUTPUT, y_TD), "attention")


def _fed_forward(run: SequenceRun, block: int, x_TD: torch.Tensor) -> torch.Tensor:
    y_TD = _experts(run, block, x_TD) if has_experts(run.model, block) else mlp(run, x_TD)
    return _after(run, y_TD, "mlp")


def _multiplied(run: SequenceRun, x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return x times a fixed factor of the model (Granite, 2024; Gemma, 2024, section 2)."""
    return x if factor == 1.0 else run.note(MULTIPLIED, factor * x)


def mlp(run: SequenceRun, x_TD: torch.Tensor, name: str = "mlp") -> torch.Tensor:
    """Return the MLP of x: down(activation(gate(x)) x up(x)), or down(activation(up(x)))."""
    up = run.linear(x_TD, f"{name}.up")
    if run.model.gated:
        gate = run.linear(x_TD, f"{name}.gate")
        run.note(PROJECTION, torch.cat((gate, up), dim=-1))
        inner = run.note(GATED, _activated(gate, run.model.activation) * up)
    else:
        inner = run.note(ACTIVATION, _activated(run.note(PROJECTION, up), run.model.activation))
    return run.note(OUTPUT, run.linear(inner, f"{name}.down"))


def _experts(run: SequenceRun, block: int, x_TD: torch.Tensor) -> torch.Tensor:
    experts = run.model.experts
    assert experts is not None, "only a block with experts comes here"
    run.routes[block] = route(run, x_TD, experts)
    y_TD = mix(run, x_TD, run.routes[block])
    if experts.shared_experts:
        y_TD = y_TD + mlp(run, x_TD, "mlp.shared")
    return run.note(EXPERTS, y_TD)


def _activated(x: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "silu":
        return x * torch.sigmoid(x)
    if activation == "gelu-exact":
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + torch.tanh(inner))


def _normed(run: SequenceRun, x_TD: torch.Tensor, name: str) -> torch.Tensor:
    scale, eps = run.weights[f"{name}.weight"], run.model.norm_eps
    if run.model.norm == "layernorm":
        return run.note(NORM, layer_norm(x_TD, scale, run.weights[f"{name}.bias"], eps))
    return run.note(NORM, root_mean_square_norm(x_TD, scale, eps))
