# SPDX-License-Identifier: Apache-2.0
"""Bytes of generation on a rank: weights and cache.

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

from echelon.core.model_shape import ModelShape
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.layout.stage import held_parameters, part_of, pieces_of, plan_of_layer


def generation_weight_bytes(plan: Plan, rank: int) -> int:
    """Return the bytes of the weights that `rank` generates with, in the dtype of master copies."""
    part = part_of(plan, rank)
    held = sum(spec.local_numel(pieces_of(plan, spec)) for spec in held_parameters(plan, part))
    return held * DTYPE_BYTES[plan.mathematics.precision.master]


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
    plan: Plan, blocks: Iterable[int], prompts: Sequence[int], *, max_tokens: int, block_tokens: int
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
