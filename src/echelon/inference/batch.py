# SPDX-License-Identifier: Apache-2.0
"""The tokens of a step: whole prompts of any lengths, or the next token of each sequence.

Both are rows side by side, without padding, each with its own position. The decoder sees one
sequence of N positions; which rows meet which keys only attention knows.

Shape suffixes: N tokens, B sequences, S positions that are read of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from echelon.cost.bytes.generate import first_kept
from echelon.inference.cache import CachedSequence, KindCaches, PagedCache
from echelon.models.batch import TokenBatch


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
