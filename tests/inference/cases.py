"""Models whose attention differs, prompts of unlike lengths, and what one process writes.

The one process has no cache and nothing of `echelon.inference`: it runs the whole text again for
each token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from echelon.core.model_shape import Experts, LatentAttention, ModelShape
from echelon.core.parameters import parameters
from echelon.core.plan import Plan
from echelon.inference.cache import CachedSequence
from echelon.models.batch import TokenBatch
from echelon.models.decoder import Decoder
from tests.parallel.layouts import DEEPSEEK, GPT2, MIXTRAL, NANO, QWEN

WIDE = replace(NANO, max_positions=64)
LATENT = replace(
    WIDE,
    kv_heads=4,
    head_dim=6,
    latent=LatentAttention(query_rank=12, kv_rank=10, nope_dim=4, rope_dim=2, value_dim=5),
)
CLAMPED = Experts(num_experts=8, top_k=2, ffn=16, bias=True, logit_bias=True, limit=1.0, alpha=1.5)
assert LATENT.latent is not None
COMPRESSED = LATENT.latent

MODELS: Mapping[str, ModelShape] = {
    "gqa": WIDE,
    "mha": replace(WIDE, kv_heads=4),
    "mqa": replace(WIDE, kv_heads=1),
    "latent": LATENT,
    "window": replace(WIDE, window=5),
    "soft-cap": replace(WIDE, soft_cap=2.0),
    "qk-norm": replace(QWEN, max_positions=64),
    "width-norm": replace(WIDE, qk_norm=True, qk_norm_over="width", norm_place="after"),
    "learned": replace(GPT2, max_positions=64),
    "experts": replace(MIXTRAL, max_positions=64),
    "shared-experts": replace(DEEPSEEK, max_positions=64),
    "biased-experts": replace(
        MIXTRAL,
        max_positions=64,
        experts=CLAMPED,
    ),
    "plain-queries": replace(LATENT, latent=replace(COMPRESSED, query_rank=None)),
    "window-latent": replace(LATENT, window=6),
    "kinds": replace(
        WIDE,
        window=5,
        layer_kinds=("local", "global"),
        local_rope_theta=50.0,
        sinks=True,
        final_soft_cap=3.0,
        attention_scale=0.7,
    ),
}
"""Every kind of attention, position and block."""

PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2], [7, 18, 28, 1, 8, 2], [31, 30])
"""Their lengths are neither equal nor multiples of a block."""


def weights_of(model: ModelShape, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return weights of which every one matters, so that unlike texts are written."""
    found: dict[str, torch.Tensor] = {}
    for number, spec in enumerate(parameters(model)):
        generator = torch.Generator().manual_seed(number)
        values = torch.randn(spec.shape, dtype=torch.float64, generator=generator)
        found[spec.name] = (0.35 * values + (spec.initial == "ones")).to(dtype)
    return found


def router_biases_of(model: ModelShape, dtype: torch.dtype) -> dict[int, torch.Tensor]:
    """Return biases that change which experts are chosen."""
    if model.experts is None or not model.experts.router_bias:
        return {}
    size = model.experts.num_experts
    return {
        layer: torch.linspace(-0.3, 0.3, size, dtype=dtype)
        for layer in range(model.layers)
        if model.layer_has_experts(layer)
    }


def without_cache(
    plan: Plan, prompts: Sequence[Sequence[int]], count: int, end: int | None = None
) -> list[list[int]]:
    """Return the likeliest tokens after each prompt, as one process without a cache finds them."""
    dtype = torch.float64
    decoder = Decoder(plan.model).to(dtype)
    decoder.load_state_dict(weights_of(plan.model, dtype))
    routing = decoder.operations.routing
    routing.balance = replace(plan.mathematics.balance, capacity_factor=None)
    routing.biases = router_biases_of(plan.model, dtype)
    return [_continued(decoder, list(prompt), count, end) for prompt in prompts]


@torch.no_grad()
def _continued(decoder: Decoder, tokens: list[int], count: int, end: int | None) -> list[int]:
    written: list[int] = []
    for _ in range(count):
        context = torch.tensor([[*tokens, *written]])
        batch = TokenBatch.from_rows(context, context, torch.zeros(1).long(), train=False)
        x_ND = decoder.norm(decoder.hidden(None, batch)[-1:])
        chosen = int(decoder.logits(x_ND).argmax())
        if chosen == end:
            break
        written.append(chosen)
    return written


def sequences_of(
    prompts: Sequence[Sequence[int]], separator: int | None = None
) -> list[CachedSequence]:
    """Return the sequences that begin with prompts, whose documents end with `separator`."""
    return [
        CachedSequence(number=number, tokens=list(one), prompt_tokens=len(one), separator=separator)
        for number, one in enumerate(prompts)
    ]


def first_difference(found: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> str:
    """Return where texts differ first, in words; "" where they do not."""
    for prompt, (ours, other) in enumerate(zip(found, wanted, strict=True)):
        for place in range(max(len(ours), len(other))):
            pair = [one[place] if place < len(one) else "nothing" for one in (ours, other)]
            if pair[0] != pair[1]:
                return f"prompt {prompt}, token {place}: {pair[0]} instead of {pair[1]}"
    return ""
