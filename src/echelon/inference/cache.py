# SPDX-License-Identifier: Apache-2.0
"""The cache of keys and values: blocks of positions in one pool, taken when they are needed.

Each block of the model has a tensor of `num_blocks x block_tokens` rows; the same rows of all of
them belong to the same positions. A sequence names its blocks in order, wherever they lie. Blocks
that are out of a window, and those of a sequence that has ended, go back to the pool.
Blocks of the model with a window, and those without, have pools apart (`KindCaches`).

The tokens of a step are whole prompts of any lengths, or the next token of each sequence: rows side
by side, without padding, each with its own position. The decoder sees one sequence of N positions;
which rows meet which keys only attention knows.

Bytes: `kind_cache_sizes` in `cost/bytes/generate.py`, exactly.
Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", 2023, section 4.

Shape suffixes: S slots (rows of a pool, or positions that are read of a sequence), W numbers of a
token, N tokens, B sequences.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from echelon.cost.bytes.generate import CacheSize, KindCacheSizes, first_kept
from echelon.models.batch import TokenBatch


@dataclass(slots=True, kw_only=True)
class CachedSequence:
    """Hold what is known of one prompt: its tokens, and the blocks that hold its keys."""

    number: int
    """The number of the prompt among all prompts of all ranks."""
    tokens: list[int]
    """The prompt, and what was written after it."""
    prompt_tokens: int
    """Tokens of the prompt."""
    blocks: list[int] = field(default_factory=list)
    """The blocks of the pool that hold its positions, in their order."""
    first_block: int = 0
    """How many blocks before them have been given back."""
    cached: int = 0
    """Positions whose keys have been written."""
    ended: bool = False
    """Whether the token that ends a text has been chosen."""
    separator: int | None = None
    """The token that ends a document, where the model was trained on separate ones; else None."""
    starts: list[int] = field(default_factory=lambda: [0])
    """Positions where documents start, of the tokens that `document_starts` has seen."""
    num_seen: int = 1
    """Tokens that it has seen."""

    others: dict[int, CachedSequence] = field(default_factory=dict["int", "CachedSequence"])
    """What caches of other kinds of blocks than the first hold of it, by their number."""

    def of_kind(self, kind: int) -> CachedSequence:
        """Return the sequence as the cache of one kind of blocks holds it; tokens are the same."""
        if kind == 0:
            return self
        if kind not in self.others:
            self.others[kind] = CachedSequence(
                number=self.number,
                tokens=self.tokens,
                prompt_tokens=self.prompt_tokens,
                separator=self.separator,
            )
        return self.others[kind]

    def document_starts(self) -> list[int]:
        """Return the positions where documents start: attention stays inside of each.

        The end of a document belongs to it, and ends in a row start none, as in the data of a run.
        """
        if self.separator is not None:
            for at in range(self.num_seen, len(self.tokens)):
                before, token = self.tokens[at - 1 : at + 1]
                if before == self.separator != token:
                    self.starts.append(at)
            self.num_seen = len(self.tokens)
        return self.starts

    @property
    def written(self) -> list[int]:
        """Return the tokens after the prompt."""
        return self.tokens[self.prompt_tokens :]


class PagedCache:
    """Hold the keys and values of all sequences of a rank."""

    def __init__(
        self,
        size: CacheSize,
        layers: Sequence[int],
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Make the pools of the given blocks of the model."""
        assert len(layers) == size.layers
        self.size, self.window, self.device = size, window, device
        rows = size.num_blocks * size.block_tokens
        # Zeros: what is masked is multiplied by 0, and must be a number.
        self.pools = {
            layer: torch.zeros(rows, size.width, dtype=dtype, device=device) for layer in layers
        }
        self._free = deque(range(size.num_blocks))

    @property
    def num_bytes(self) -> int:
        """Return the bytes that are held."""
        return sum(pool.nbytes for pool in self.pools.values())

    @property
    def num_free(self) -> int:
        """Return the blocks that nobody holds."""
        return len(self._free)

    def extend(self, sequence: CachedSequence, until: int) -> range:
        """Make room for the positions up to but without `until`; return those that are kept.

        What no later query meets gets no room, and what no query meets any more loses it.
        """
        tokens = self.size.block_tokens
        start = first_kept(until - 1, self.window)
        while sequence.blocks and (sequence.first_block + 1) * tokens <= start:
            self._free.append(sequence.blocks.pop(0))
            sequence.first_block += 1
        if not sequence.blocks:
            sequence.first_block = start // tokens
        while (sequence.first_block + len(sequence.blocks)) * tokens < until:
            sequence.blocks.append(self._free.popleft())
        kept = range(max(start, sequence.cached), until)
        sequence.cached = until
        return kept

    def release(self, sequence: CachedSequence) -> None:
        """Give back the blocks of a sequence that has ended, those that were taken last first."""
        self._free.extendleft(reversed(sequence.blocks))
        sequence.blocks.clear()

    def slots(self, sequence: CachedSequence, positions: range) -> torch.Tensor:
        """Return the rows of the pools that hold `positions` of a sequence, int64."""
        tokens = self.size.block_tokens
        starts = torch.tensor(sequence.blocks, dtype=torch.int64) * tokens
        at = torch.arange(positions.start, positions.stop) - sequence.first_block * tokens
        return starts[at // tokens] + at % tokens

    def write(self, layer: int, slots_S: torch.Tensor, rows_SW: torch.Tensor) -> None:
        """Write what tokens keep."""
        self.pools[layer].index_copy_(0, slots_S, rows_SW)

    def read(self, layer: int, slots_S: torch.Tensor | slice) -> torch.Tensor:
        """Return rows of a pool: a view where they lie side by side."""
        pool = self.pools[layer]
        return pool[slots_S] if isinstance(slots_S, slice) else pool.index_select(0, slots_S)


class KindCaches:
    """Hold a cache for each kind of blocks: those with a window hold fewer positions."""

    def __init__(self, sizes: KindCacheSizes, dtype: torch.dtype, device: torch.device) -> None:
        """Make the pools of all blocks of a rank; one without blocks has none."""
        self.device = device
        self.caches = tuple(
            PagedCache(size, blocks, window, dtype, device)
            for size, blocks, window in zip(sizes.sizes, sizes.blocks, sizes.windows, strict=True)
        )
        self._kinds = {layer: kind for kind, blocks in enumerate(sizes.blocks) for layer in blocks}

    @property
    def num_bytes(self) -> int:
        """Return the bytes that are held."""
        return sum(cache.num_bytes for cache in self.caches)

    @property
    def num_free(self) -> int:
        """Return the blocks of all pools that nobody holds."""
        return sum(cache.num_free for cache in self.caches)

    def kind_of(self, layer: int) -> int:
        """Return the number of the cache of a block of the model."""
        return self._kinds[layer]

    def release(self, sequence: CachedSequence) -> None:
        """Give back all blocks of a sequence that has ended."""
        for kind, cache in enumerate(self.caches):
            cache.release(sequence.of_kind(kind))


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlaces:
    """Say which rows of the cache of one kind of blocks a step writes and reads."""

    kept_M: torch.Tensor | None
    """The rows of the batch that write to the cache; None: all."""
    write_M: torch.Tensor
    """Where they write."""
    read_BS: torch.Tensor | slice | None = None
    """Where the keys of a next token are, B x S side by side; a slice where they are in order."""
    seen_BS: torch.Tensor | None = None
    """Which of them a token meets; None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheBatch(TokenBatch):
    """Hold the tokens of a step, and which rows of the cache they write and read."""

    positions_N: torch.Tensor
    """The position of each token in its own sequence, int64, on the host."""
    spans: tuple[slice, ...]
    """The rows of each document of each prompt; none where each row is the next token of a
    sequence."""
    last_B: torch.Tensor
    """The row of each sequence whose output says what comes next, int64."""
    places: tuple[CachePlaces, ...]
    """Where they are in the cache of each kind of blocks."""

    @property
    def positions_T(self) -> torch.Tensor:
        """Return the position of each token."""
        return self.positions_N.to(self.tokens_N.device)


def prompt_batch(caches: KindCaches, sequences: Sequence[CachedSequence]) -> CacheBatch:
    """Return the batch that reads prompts, each from its beginning to its end."""
    tokens: list[int] = []
    spans: list[slice] = []
    last: list[int] = []
    for sequence in sequences:
        first = len(tokens)
        tokens += sequence.tokens
        bounds = [first + start for start in sequence.document_starts()]
        spans += [slice(*ends) for ends in pairwise([*bounds, len(tokens)])]
        last.append(len(tokens) - 1)
    positions_N = torch.cat([torch.arange(len(sequence.tokens)) for sequence in sequences])
    return CacheBatch(
        **_rows(tokens, positions_N, caches.device),
        spans=tuple(spans),
        last_B=torch.tensor(last, device=caches.device),
        places=tuple(
            _prompt_places(cache, [one.of_kind(kind) for one in sequences])
            for kind, cache in enumerate(caches.caches)
        ),
    )


def _prompt_places(cache: PagedCache, sequences: Sequence[CachedSequence]) -> CachePlaces:
    kept: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    start = 0
    for sequence in sequences:
        length = len(sequence.tokens)
        held = cache.extend(sequence, length)
        kept.append(torch.arange(start + held.start, start + held.stop))
        writes.append(cache.slots(sequence, held))
        start += length
    kept_M = torch.cat(kept)
    return CachePlaces(
        kept_M=None if len(kept_M) == start else kept_M.to(cache.device),
        write_M=torch.cat(writes).to(cache.device),
    )


def next_batch(caches: KindCaches, sequences: Sequence[CachedSequence]) -> CacheBatch:
    """Return the batch of the last token of each sequence, which meets what is cached of it."""
    positions_N = torch.tensor([len(sequence.tokens) - 1 for sequence in sequences])
    return CacheBatch(
        **_rows([sequence.tokens[-1] for sequence in sequences], positions_N, caches.device),
        spans=(),
        last_B=torch.arange(len(sequences), device=caches.device),
        places=tuple(
            _next_places(cache, [one.of_kind(kind) for one in sequences])
            for kind, cache in enumerate(caches.caches)
        ),
    )


def _next_places(cache: PagedCache, sequences: Sequence[CachedSequence]) -> CachePlaces:
    writes: list[torch.Tensor] = []
    reads: list[torch.Tensor] = []
    for sequence in sequences:
        at = len(sequence.tokens) - 1
        writes.append(cache.slots(sequence, cache.extend(sequence, at + 1)))
        first = max(first_kept(at, cache.window), sequence.document_starts()[-1])
        reads.append(cache.slots(sequence, range(first, at + 1)))
    longest = max(len(one) for one in reads)
    seen: torch.Tensor | None = None
    if any(len(one) < longest for one in reads):
        lengths_B = torch.tensor([len(one) for one in reads])
        seen = (torch.arange(longest) < lengths_B[:, None]).to(cache.device)
        reads = [torch.nn.functional.pad(one, (0, longest - len(one))) for one in reads]
    return CachePlaces(
        kept_M=None,
        write_M=torch.cat(writes).to(cache.device),
        read_BS=_in_order(reads, cache.device),
        seen_BS=seen,
    )


def _rows(tokens: list[int], positions_N: torch.Tensor, device: torch.device) -> dict[str, Any]:
    tokens_N = torch.tensor(tokens, dtype=torch.int64, device=device)
    return {
        "tokens_N": tokens_N,
        "labels_N": tokens_N,
        "sample_ids_B": torch.zeros(1, dtype=torch.int64),
        "runs": (),
        "whole_length": len(tokens),
        "train": False,
        "positions_N": positions_N,
    }


def _in_order(reads: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor | slice:
    """Return the rows of a pool that are read: of one sequence a slice, where they follow."""
    if len(reads) > 1:
        return torch.cat(list(reads)).to(device)
    first, last = int(reads[0][0]), int(reads[0][-1])
    in_order = last - first + 1 == len(reads[0]) and bool((reads[0].diff() == 1).all())
    return slice(first, last + 1) if in_order else reads[0].to(device)
