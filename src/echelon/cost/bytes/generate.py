# SPDX-License-Identifier: Apache-2.0
"""Bytes of generation on a rank: weights, messages over `tp` and between stages, cache.

A pass has N tokens of B sequences: whole prompts at first, then one token of each sequence.
Source: Pope et al., "Efficiently Scaling Transformer Inference", 2022, section 3.2.1.

The cache: a token keeps, in every block of the model, one key and one value of each key/value head
of its rank: 2 x kv_heads / tp x head_dim numbers (Ainslie et al., "GQA", 2023, section 2). Under
latent attention it keeps the narrow vector and the shared key part instead, kv_rank + rope_dim
numbers, which all heads read and so every tensor rank has whole (DeepSeek-V2, 2024, section 2.1.2).
The pool is cut into blocks of `block_tokens` positions (Kwon et al., "PagedAttention", 2023,
section 4.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from echelon.core.axis import Axis
from echelon.core.model_shape import ModelShape
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.bytes.all_reduce import slices_sent, sums_sent
from echelon.cost.bytes.sent import normed_together
from echelon.cost.bytes.terms import WIDE_BYTES
from echelon.layout.stage import StagePart, held_parameters, part_of, pieces_of, plan_of_layer

_NUMBER_BYTES = 8  # of a token id, and of the largest logit beside it


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPass:
    """Say how many tokens of how many sequences cross the stages together."""

    tokens: int
    sequences: int


def generation_weight_bytes(plan: Plan, rank: int) -> int:
    """Return the bytes of the weights that `rank` generates with, in the dtype of master copies."""
    part = part_of(plan, rank)
    held = sum(spec.local_numel(pieces_of(plan, spec)) for spec in held_parameters(plan, part))
    return held * DTYPE_BYTES[plan.mathematics.precision.master]


def generated_bytes(
    plan: Plan, rank: int, passes: Iterable[GenerationPass], *, greedy: bool
) -> dict[str, int]:
    """Return the bytes that `rank` sends in the given passes, by axis; none where it has no peer.

    `greedy`: only the largest logit of a sequence is told, else all of them are.
    """
    (stage,) = part_of(plan, rank).stages
    found = {Axis.TP.value: 0, Axis.PP.value: 0}
    for one in passes:
        found[Axis.TP.value] += _over_tensor(plan, rank, stage, one, greedy=greedy)
        found[Axis.PP.value] += _over_pipeline(plan, stage, one)
    return {axis: num_bytes for axis, num_bytes in found.items() if num_bytes}


def _over_tensor(
    plan: Plan, rank: int, stage: StagePart, one: GenerationPass, *, greedy: bool
) -> int:
    model, ranks = plan.model, plan.mesh.group(rank, Axis.TP)
    size = DTYPE_BYTES[plan.mathematics.precision.master]
    sums = stage.first + len(stage.blocks)
    for layer in stage.blocks:
        if not model.layer_has_experts(layer):
            sums += 1
            continue
        assert model.experts is not None
        sums += plan.mesh.ep > 1 or plan.layout.experts.expert_tp > 1
        sums += model.experts.shared_experts > 0
    sent = sums * sums_sent(plan, ranks, rank, (one.tokens * model.hidden,), size)[0]
    if normed_together(model):
        wide = max(WIDE_BYTES, size)
        sent += len(stage.blocks) * sums_sent(plan, ranks, rank, (2 * one.tokens,), wide)[0]
    if stage.last:
        local_vocab = -(-model.vocab // len(ranks))
        # Whether to stop is told with them: once, or beside the logits of each sequence.
        greedily, drawn = 2 * _NUMBER_BYTES * (one.sequences + 1), (local_vocab + 1) * size
        piece = greedily if greedy else one.sequences * drawn
        sent += slices_sent(plan, ranks, rank, piece)[0]
    return sent


def _over_pipeline(plan: Plan, stage: StagePart, one: GenerationPass) -> int:
    if stage.last:
        return (plan.mesh.pp - 1) * (one.sequences + 1) * _NUMBER_BYTES
    return one.tokens * plan.model.hidden * DTYPE_BYTES[plan.mathematics.precision.master]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    """Say how large the pool of one rank is."""

    num_blocks: int
    """Blocks of the pool: those that all its prompts need at once."""
    block_tokens: int
    """Positions of a block."""
    layers: int
    """Blocks of the model on this rank, each of which has such a pool."""
    width: int
    """Numbers that a token keeps in one of them."""
    element_bytes: int
    """Bytes of a number."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the pools of all blocks of the model."""
        tokens = self.num_blocks * self.block_tokens
        return tokens * self.width * self.element_bytes * self.layers


@dataclass(frozen=True, slots=True, kw_only=True)
class KindCacheSizes:
    """Say how large the pools of one rank are: those of blocks with one window lie together."""

    blocks: tuple[tuple[int, ...], ...]
    """The blocks of the model of each kind."""
    windows: tuple[int | None, ...]
    """Their windows."""
    sizes: tuple[CacheSize, ...]
    """Their pools."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all pools."""
        return sum(size.num_bytes for size in self.sizes)


def cache_width(model: ModelShape, tp: int) -> int:
    """Return the numbers that a token keeps on a tensor rank in one block of the model."""
    if model.latent is not None:
        return model.latent.kv_rank + model.latent.rope_dim
    return 2 * (model.kv_heads // tp) * model.head_dim


def cached_blocks(
    prompt_tokens: int, max_tokens: int, block_tokens: int, window: int | None
) -> int:
    """Return the most blocks that a prompt and what follows it hold at once.

    The last token that is written is read by nobody, so its key is never there. With a window of w
    only blocks with one of the last w positions are held, whatever has been written by then.
    """
    last = prompt_tokens + max_tokens - 2
    if window is None:
        return last // block_tokens + 1
    # What a window touches repeats from block to block, once it does not touch the start.
    until = min(last, max(prompt_tokens - 1, window) + block_tokens)
    return max(
        at // block_tokens - first_kept(at, window) // block_tokens + 1
        for at in range(prompt_tokens - 1, until + 1)
    )


def first_kept(position: int, window: int | None) -> int:
    """Return the first position that is kept when the one at `position` has been written."""
    return 0 if window is None else max(0, position - window + 1)


def kind_cache_sizes(
    plan: Plan,
    blocks: Iterable[int],
    prompts: Sequence[int],
    *,
    max_tokens: int,
    block_tokens: int,
) -> KindCacheSizes:
    """Return the pools of a rank with these blocks, kind by kind: local ones hold a window."""
    by_kind: dict[int | None, list[int]] = {}
    for block in blocks:
        by_kind.setdefault(plan.model.of_layer(block).window, []).append(block)
    return KindCacheSizes(
        blocks=tuple(map(tuple, by_kind.values())),
        windows=tuple(by_kind),
        sizes=tuple(
            cache_size(
                plan_of_layer(plan, mine[0]),
                len(mine),
                prompts,
                max_tokens=max_tokens,
                block_tokens=block_tokens,
            )
            for mine in by_kind.values()
        ),
    )


def cache_size(
    plan: Plan, layers: int, prompts: Iterable[int], *, max_tokens: int, block_tokens: int
) -> CacheSize:
    """Return the pool of a rank with `layers` blocks, all alike, for prompts of so many tokens."""
    window = plan.model.window
    return CacheSize(
        num_blocks=sum(
            cached_blocks(tokens, max_tokens, block_tokens, window) for tokens in prompts
        ),
        block_tokens=block_tokens,
        layers=layers,
        width=cache_width(plan.model, plan.mesh.tp),
        element_bytes=DTYPE_BYTES[plan.mathematics.precision.master],
    )
