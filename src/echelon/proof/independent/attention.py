"""Attention of one sequence, as the papers write it: grouped heads, rotary positions, latent keys.

Vaswani et al., 2017, equation 1; Ainslie et al., "GQA", 2023; Su et al., "RoFormer", 2021, section
3.4.2 in the form of Llama, where dim i of the first half of a head is turned with dim i of the
second; Grattafiori et al., "Llama 3", 2024, for stretched frequencies; Gemma 2, 2024, for the soft
cap; DeepSeek-V2, 2024, section 2.1, for latent attention.

Shape suffixes: T positions, H query heads, K key/value heads, S key positions, d a head's width, E
frequencies, R rank, P rotary width, D hidden.
"""

from __future__ import annotations

import cmath
import math
from dataclasses import dataclass

import torch

from echelon.core.model_shape import LatentAttention, ModelShape
from echelon.proof.independent.sequence import SequenceRun, root_mean_square_norm

ROTARY = "rotary positions"
ATTENTION = "attention"
PROJECTION = "projection"
NORM = "norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreSettings:
    """Say which keys a query meets, and what becomes of their product."""

    causal: bool
    window: int | None
    soft_cap: float | None
    width: int
    scale: float | None = None
    documents: tuple[int, ...] = (0,)

    @classmethod
    def of(cls, run: SequenceRun) -> ScoreSettings:
        """Return what a model and a sequence say."""
        model = run.model
        return cls(
            causal=model.causal,
            window=model.window,
            soft_cap=model.soft_cap,
            width=model.head_dim,
            scale=model.score_scale,
            documents=run.documents,
        )

    def allows(self, query: int, key: int) -> bool:
        """Return whether the query at one position meets the key at another."""
        if self.causal and key > query:
            return False
        if self.window is not None and abs(query - key) >= self.window:
            return False
        document = [max(start for start in self.documents if start <= at) for at in (query, key)]
        return document[0] == document[1]


def turns_of(model: ModelShape, length: int, block: int | None = None) -> torch.Tensor:
    """Return e^(i t w) for every position t and frequency w, complex128 [T, E].

    Dims that do not turn, in any block or in `block` (SmolLM3, 2025), have the frequency 0.
    """
    width = model.head_dim if model.latent is None else model.latent.rope_dim
    turned = width
    if model.latent is None:
        turned = 2 * int(width * model.rotary.fraction / 2)
    pairs = turned // 2
    frequencies = [model.rope_theta ** (-2 * pair / turned) for pair in range(pairs)]
    if model.rotary.none_every and block is not None and not (block + 1) % model.rotary.none_every:
        frequencies = [0.0] * pairs
    frequencies += [0.0] * (width // 2 - pairs)
    if model.rope_scaling is not None:
        frequencies = [_stretched(model, one) for one in frequencies]
    return torch.tensor(
        [[cmath.exp(1j * t * w) for w in frequencies] for t in range(length)],
        dtype=torch.complex128,
    )


def _stretched(model: ModelShape, frequency: float) -> float:
    """Return a frequency of Llama 3.1, by its wave length beside the original positions."""
    scaling = model.rope_scaling
    assert scaling is not None, "only stretched frequencies come here"
    if frequency == 0.0:
        return 0.0
    wave = 2 * math.pi / frequency
    if wave < scaling.original_positions / scaling.high_frequency_factor:
        return frequency
    if wave > scaling.original_positions / scaling.low_frequency_factor:
        return frequency / scaling.factor
    smooth = scaling.original_positions / wave - scaling.low_frequency_factor
    smooth /= scaling.high_frequency_factor - scaling.low_frequency_factor
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def turned(x_THd: torch.Tensor, turns_TE: torch.Tensor) -> torch.Tensor:
    """Return every head turned by its position: each pair of dims is a complex number."""
    half = x_THd.shape[-1] // 2
    pairs = torch.complex(x_THd[..., :half], x_THd[..., half:]) * turns_TE[:, None, :]
    return torch.cat((pairs.real, pairs.imag), dim=-1)


def attend(
    q_THd: torch.Tensor, k_SKd: torch.Tensor, v_SKd: torch.Tensor, settings: ScoreSettings
) -> torch.Tensor:
    """Return softmax(cap(q k / sqrt(d))) v of every head; query head h has key head h // (H/K)."""
    length, heads = q_THd.shape[:2]
    seen = torch.tensor(
        [[settings.allows(query, key) for key in range(length)] for query in range(length)]
    )
    scale = 1 / math.sqrt(settings.width) if settings.scale is None else settings.scale
    outs: list[torch.Tensor] = []
    for head in range(heads):
        own = head // (heads // k_SKd.shape[1])
        scores_TS = q_THd[:, head] @ k_SKd[:, own].T * scale
        if settings.soft_cap is not None:
            scores_TS = settings.soft_cap * torch.tanh(scores_TS / settings.soft_cap)
        weights_TS = torch.softmax(torch.where(seen, scores_TS, -torch.inf), dim=-1)
        outs.append(weights_TS @ v_SKd[:, own])
    return torch.stack(outs, dim=1)


def grouped_attention(run: SequenceRun, x_TD: torch.Tensor) -> torch.Tensor:
    """Return what the attention of a block makes of x, [T, D]."""
    model, length = run.model, len(x_TD)
    rows = [run.linear(x_TD, f"attention.{name}") for name in "qkv"]
    run.note(PROJECTION, torch.cat(rows, dim=-1))
    q, k, v = (row.reshape(length, -1, model.head_dim) for row in rows)
    if model.qk_norm and model.qk_norm_over == "width":
        # OLMo 2, 2024, section 3.3.2: before there are heads.
        q, k = (
            run.note(NORM, root_mean_square_norm(x, run.weight(name), model.norm_eps)).reshape(
                length, -1, model.head_dim
            )
            for x, name in (
                (rows[0], "attention.q_norm.weight"),
                (rows[1], "attention.k_norm.weight"),
            )
        )
    elif model.qk_norm:
        q, k = (
            run.note(NORM, root_mean_square_norm(x, run.weight(name), model.norm_eps))
            for x, name in ((q, "attention.q_norm.weight"), (k, "attention.k_norm.weight"))
        )
    if model.positions == "rope":
        turns_TE = turns_of(model, length, int(run.unit.rpartition(".")[2]))
        q, k = run.note(ROTARY, turned(q, turns_TE)), run.note(ROTARY, turned(k, turns_TE))
    out = attend(q, k, v, ScoreSettings.of(run)).reshape(length, -1)
    return run.linear(run.note(ATTENTION, out), "attention.o")


def latent_attention(run: SequenceRun, latent: LatentAttention, x_TD: torch.Tensor) -> torch.Tensor:
    """Return what latent attention makes of x, [T, D]: keys and values come of a narrow vector."""
    model, length = run.model, len(x_TD)
    q_TR, kv = run.linear(x_TD, "attention.q_down"), run.linear(x_TD, "attention.kv_down")
    run.note(PROJECTION, torch.cat((q_TR, kv), dim=-1))
    kv_TR, shared_TP = kv[:, : latent.kv_rank], kv[:, latent.kv_rank :]
    q_TR, kv_TR = (
        run.note(NORM, root_mean_square_norm(x, run.weight(name), model.norm_eps))
        for x, name in ((q_TR, "attention.q_norm.weight"), (kv_TR, "attention.kv_norm.weight"))
    )
    q = run.note(PROJECTION, run.linear(q_TR, "attention.q_up")).reshape(length, model.heads, -1)
    kv = run.note(PROJECTION, run.linear(kv_TR, "attention.kv_up")).reshape(length, model.heads, -1)
    turns_TE = turns_of(model, length)
    shared = run.note(ROTARY, turned(shared_TP[:, None, :], turns_TE))
    q_turned = run.note(ROTARY, turned(q[..., latent.nope_dim :], turns_TE))
    q = torch.cat((q[..., : latent.nope_dim], q_turned), dim=-1)
    k = torch.cat(
        (kv[..., : latent.nope_dim], shared.expand(length, model.heads, latent.rope_dim)), dim=-1
    )
    out = attend(q, k, kv[..., latent.nope_dim :], ScoreSettings.of(run))
    run.note(ATTENTION, out.reshape(length, -1))
    return run.linear(out.reshape(length, -1), "attention.o")
