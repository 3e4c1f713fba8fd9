# SPDX-License-Identifier: Apache-2.0
"""Attention of one sequence, as the papers write it: grouped heads, rotary positions, latent keys.

Vaswani et al., 2017, equation 1; Ainslie et al., "GQA", 2023; Su et al., "RoFormer", 2021, section
3.4.2 in the form of Llama, where dim i of the first half of a head is turned with dim i of the
second; Grattafiori et al., "Llama 3", 2024, for stretched frequencies; Gemma 2, 2024, for the soft
cap and the blocks that have a window; gpt-oss, 2025, for sinks; DeepSeek-V2, 2024, section 2.1, for
latent attention.

Shape suffixes: T positions, H query heads, K key/value heads, S key positions, d a head's width, E
frequencies, R rank, P rotary width, D hidden.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from echelon.core.model_shape import LatentAttention, ModelShape, RopeScaling
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
    other_window: int | None
    """That of the other kind of blocks, where there is one."""
    soft_cap: float | None
    scale: float
    head_dim: int
    documents: tuple[int, ...] = (0,)
    sinks: torch.Tensor | None = None
    """A score of each head beside those of keys."""

    @classmethod
    def of(cls, run: SequenceRun, unit: str) -> ScoreSettings:
        """Return what a model and a sequence say of a block."""
        model = run.model
        windows = (model.window, None) if has_window(model, unit) else (None, model.window)
        scale = model.attention_scale
        return cls(
            causal=model.causal,
            window=windows[0],
            other_window=windows[1] if model.layer_kinds else windows[0],
            soft_cap=model.soft_cap,
            scale=1 / math.sqrt(model.head_dim) if scale is None else scale,
            head_dim=model.head_dim,
            documents=run.documents,
            sinks=run.weights[f"{unit}.attention.sinks.weight"] if model.sinks else None,
        )

    def allows(self, query: int, key: int) -> bool:
        """Return whether the query at one position meets the key at another."""
        if self.causal and key > query:
            return False
        if self.window is not None and abs(query - key) >= self.window:
            return False
        document = [max(start for start in self.documents if start <= at) for at in (query, key)]
        return document[0] == document[1]


def has_window(model: ModelShape, unit: str) -> bool:
    """Return whether a block ("layers.3") has the window of the model: kinds come in turn."""
    if model.window is None or not model.layer_kinds:
        return model.window is not None
    return model.layer_kinds[int(unit.split(".")[1]) % len(model.layer_kinds)] == "local"


def turns_of(model: ModelShape, unit: str, length: int) -> torch.Tensor:
    """Return m e^(i t w) for every position t and frequency w of a block, complex128 [T, E].

    m is 1, or what stretched frequencies sharpen scores by. Dims that do not turn, in any block or
    in this one (SmolLM3, 2025), have the frequency 0.
    """
    width = model.head_dim if model.latent is None else model.latent.rope_dim
    turned, every = width, model.rotary.none_every
    if model.latent is None:
        turned = 2 * int(width * model.rotary.fraction / 2)
    base, scaling = model.rope_theta, model.rope_scaling
    if model.local_rope_theta is not None and has_window(model, unit):
        base, scaling = model.local_rope_theta, None
    frequencies = [base ** (-2 * pair / turned) for pair in range(turned // 2)]
    sharper = 1.0
    if scaling is not None:
        frequencies = [
            _STRETCHES[scaling.kind](scaling, one, _Place(pair, turned, base, length))
            for pair, one in enumerate(frequencies)
        ]
        sharper = _sharper(scaling)
    if every and not (int(unit.split(".")[1]) + 1) % every:
        frequencies = []
    still = width // 2 - len(frequencies)
    frequencies += [0.0] * still
    sharp = [sharper] * (width // 2 - still) + [1.0] * still
    return torch.tensor(
        [
            [m * cmath.exp(1j * t * w) for m, w in zip(sharp, frequencies, strict=True)]
            for t in range(length)
        ],
        dtype=torch.complex128,
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """Say which pair of dims a frequency turns, of how many dims, and in how long a sequence."""

    pair: int
    width: int
    base: float
    length: int


def _sharper(scaling: RopeScaling) -> float:
    """Return 0.1 ln s + 1 under YaRN, sqrt(1 + ln s / ln L) under LongRoPE, or what is given."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.kind == "yarn" and scaling.factor > 1:
        return 0.1 * math.log(scaling.factor) + 1
    if scaling.kind == "longrope" and scaling.factor > 1:
        return math.sqrt(1 + math.log(scaling.factor) / math.log(_original(scaling)))
    return 1.0


def _original(scaling: RopeScaling) -> int:
    assert scaling.original_positions is not None, "kinds that need it have it"
    return scaling.original_positions


def _interpolated(scaling: RopeScaling, frequency: float, place: _Place) -> float:
    """Return a frequency of linear interpolation (Chen et al., 2023)."""
    return frequency / scaling.factor


def _searched(scaling: RopeScaling, frequency: float, place: _Place) -> float:
    """Return a frequency of LongRoPE (Ding et al., 2024)."""
    long = place.length > _original(scaling)
    return frequency / (scaling.long_factors if long else scaling.short_factors)[place.pair]


def _by_dims(scaling: RopeScaling, frequency: float, place: _Place) -> float:
    """Return a frequency of YaRN (Peng et al., 2023): its ramp goes by pairs of dims."""
    ends: list[float] = []
    for turns in (scaling.fast_turns, scaling.slow_turns):
        wave = _original(scaling) / turns
        ends.append(place.width * math.log(wave / (2 * math.pi)) / (2 * math.log(place.base)))
    if scaling.whole_dims:
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    first, last = max(0, ends[0]), min(place.width - 1, ends[1])
    if first == last:
        last += 0.001
    stretched = min(1.0, max(0.0, (place.pair - first) / (last - first)))
    return frequency * (1 - stretched) + frequency / scaling.factor * stretched


def _by_waves(scaling: RopeScaling, frequency: float, place: _Place) -> float:
    """Return a frequency of Llama 3.1, by its wave length beside the original positions."""
    original = _original(scaling)
    assert scaling.low_frequency_factor is not None, "a rule asks for it"
    assert scaling.high_frequency_factor is not None, "a rule asks for it"
    wave = 2 * math.pi / frequency
    if wave < original / scaling.high_frequency_factor:
        return frequency
    if wave > original / scaling.low_frequency_factor:
        return frequency / scaling.factor
    smooth = original / wave - scaling.low_frequency_factor
    smooth /= scaling.high_frequency_factor - scaling.low_frequency_factor
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


_STRETCHES: Mapping[str, Callable[[RopeScaling, float, _Place], float]] = {
    "llama3": _by_waves,
    "linear": _interpolated,
    "yarn": _by_dims,
    "longrope": _searched,
}


def turned(x_THd: torch.Tensor, turns_TE: torch.Tensor) -> torch.Tensor:
    """Return every head turned by its position: each pair of dims is a complex number."""
    half = x_THd.shape[-1] // 2
    pairs = torch.complex(x_THd[..., :half], x_THd[..., half:]) * turns_TE[:, None, :]
    return torch.cat((pairs.real, pairs.imag), dim=-1)


def attend(
    q_THd: torch.Tensor,
    k_SKd: torch.Tensor,
    v_SKd: torch.Tensor,
    settings: ScoreSettings,
    seen: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return softmax(cap(scale q k)) v of every head; query head h has key head h // (H/K).

    Where a head has a sink, e^sink is in the sum that its weights are divided by. `seen` says which
    keys each query meets, [T, S]; None: those that the settings allow.
    """
    length, heads = q_THd.shape[:2]
    if seen is None:
        allowed = [
            [settings.allows(query, key) for key in range(length)] for query in range(length)
        ]
        seen = torch.tensor(allowed)
    outs: list[torch.Tensor] = []
    for head in range(heads):
        own = head // (heads // k_SKd.shape[1])
        scores_TS = q_THd[:, head] @ k_SKd[:, own].T * settings.scale
        if settings.soft_cap is not None:
            scores_TS = settings.soft_cap * torch.tanh(scores_TS / settings.soft_cap)
        scores_TS = torch.where(seen, scores_TS, -torch.inf)
        if settings.sinks is None:
            weights_TS = torch.softmax(scores_TS, dim=-1)
        else:
            whole_T = torch.logaddexp(torch.logsumexp(scores_TS, dim=-1), settings.sinks[head])
            weights_TS = torch.exp(scores_TS - whole_T[:, None])
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
        turns_TE = turns_of(model, run.unit, length)
        q, k = run.note(ROTARY, turned(q, turns_TE)), run.note(ROTARY, turned(k, turns_TE))
    run.heads[run.unit] = q, k, v
    out = attend(q, k, v, ScoreSettings.of(run, run.unit)).reshape(length, -1)
    return run.linear(run.note(ATTENTION, out), "attention.o")


def latent_attention(run: SequenceRun, latent: LatentAttention, x_TD: torch.Tensor) -> torch.Tensor:
    """Return what latent attention makes of x, [T, D]: keys and values come of a narrow vector."""
    model, length = run.model, len(x_TD)
    kv = run.linear(x_TD, "attention.kv_down")
    kv_TR, shared_TP = kv[:, : latent.kv_rank], kv[:, latent.kv_rank :]

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        scale = run.weight(f"attention.{name}.weight")
        return run.note(NORM, root_mean_square_norm(x, scale, model.norm_eps))

    if latent.query_rank is None:
        run.note(PROJECTION, kv)
        q_TR = x_TD
    else:
        q_TR = run.linear(x_TD, "attention.q_down")
        run.note(PROJECTION, torch.cat((q_TR, kv), dim=-1))
        q_TR = normed(q_TR, "q_norm")
    kv_TR = normed(kv_TR, "kv_norm")
    q = run.note(PROJECTION, run.linear(q_TR, "attention.q_up")).reshape(length, model.heads, -1)
    kv = run.note(PROJECTION, run.linear(kv_TR, "attention.kv_up")).reshape(length, model.heads, -1)
    turns_TE = turns_of(model, run.unit, length)
    shared = run.note(ROTARY, turned(shared_TP[:, None, :], turns_TE))
    q_turned = run.note(ROTARY, turned(q[..., latent.nope_dim :], turns_TE))
    q = torch.cat((q[..., : latent.nope_dim], q_turned), dim=-1)
    k = torch.cat(
        (kv[..., : latent.nope_dim], shared.expand(length, model.heads, latent.rope_dim)), dim=-1
    )
    run.heads[run.unit] = q, k, kv[..., latent.nope_dim :]
    out = attend(*run.heads[run.unit], ScoreSettings.of(run, run.unit))
    run.note(ATTENTION, out.reshape(length, -1))
    return run.linear(out.reshape(length, -1), "attention.o")
