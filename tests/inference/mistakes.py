"""Mistakes that are planted into generation, each where a rank would make it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from echelon.inference import cache as cache_module
from echelon.inference import generator
from echelon.inference.cache import CachedSequence, KindCaches, PagedCache
from echelon.inference.operations import CachedAttention, CacheOperations
from echelon.launch.context import RankContext
from echelon.training import inference as weights
from tests.inference.targets import Written, write

Patch = Callable[[pytest.MonkeyPatch], None]


def reads_one_position_less(patch: pytest.MonkeyPatch) -> None:
    """Leave out the oldest key of each sequence."""
    slots = PagedCache.slots

    def short(self: PagedCache, one: CachedSequence, positions: range) -> torch.Tensor:
        read = len(positions) > 1 and positions.start == 0
        return slots(self, one, positions[1:] if read and one.written else positions)

    patch.setattr(PagedCache, "slots", short)


def turns_by_the_next_position(patch: pytest.MonkeyPatch) -> None:
    """Take the number of a token for its position."""
    made = cache_module.next_batch

    def shifted(cache: KindCaches, sequences: list[CachedSequence]) -> cache_module.CacheBatch:
        found = made(cache, sequences)
        found.positions_N.add_(1)
        return found

    patch.setattr(generator, "next_batch", shifted)


def writes_one_position_late(patch: pytest.MonkeyPatch) -> None:
    """Write the key of each next token where the one after it belongs."""
    write_rows = PagedCache.write

    def late(self: PagedCache, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        last = self.pools[layer].shape[0] - 1
        write_rows(self, layer, (slots + 1).clamp(max=last), rows)

    patch.setattr(PagedCache, "write", late)


def every_rank_keeps_the_first_heads(patch: pytest.MonkeyPatch) -> None:
    """Give each rank the keys and values of the first, not of its own heads."""
    rectangle = weights.tensor_rank_rectangle

    def first(spec: Any, group: Any) -> Any:
        offset, size = rectangle(spec, group)
        cached = spec.name.endswith(("attention.k.weight", "attention.v.weight"))
        return ((0, 0), size) if cached else (offset, size)

    patch.setattr(weights, "tensor_rank_rectangle", first)


def gives_a_block_to_two(patch: pytest.MonkeyPatch) -> None:
    """Give out blocks that another sequence still has."""
    extend = PagedCache.extend

    def shared(self: PagedCache, one: CachedSequence, until: int) -> range:
        before = len(one.blocks)
        kept = extend(self, one, until)
        self._free.extendleft(one.blocks[before:])
        return kept

    patch.setattr(PagedCache, "extend", shared)


def forgets_a_sum(patch: pytest.MonkeyPatch) -> None:
    """Leave what attention and the MLP of a rank give as it is."""
    patch.setattr(CacheOperations, "project_out", lambda self, x, linear: linear(x))


def sees_padding(patch: pytest.MonkeyPatch) -> None:
    """Let short sequences meet what pads them."""
    of_next = CachedAttention.of_next
    patch.setattr(
        CachedAttention, "of_next", lambda self, q, k, v, seen: of_next(self, q, k, v, None)
    )


def forgets_the_cap(patch: pytest.MonkeyPatch) -> None:
    """Leave scores as they are."""
    init = CachedAttention.__init__

    def uncapped(self: CachedAttention, **changes: Any) -> None:
        changes["soft_cap"] = None
        init(self, **changes)

    patch.setattr(CachedAttention, "__init__", uncapped)


def forgets_the_window(patch: pytest.MonkeyPatch) -> None:
    """Read all keys that blocks still hold; blocks are given back as ever."""
    right, extend = cache_module.first_kept, PagedCache.extend

    def extended(self: PagedCache, *args: Any) -> range:
        with pytest.MonkeyPatch.context() as own:
            own.setattr(cache_module, "first_kept", right)
            return extend(self, *args)

    patch.setattr(PagedCache, "extend", extended)
    patch.setattr(
        cache_module, "first_kept", lambda position, window: max(0, position - window - 1)
    )


MISTAKES: Mapping[str, Patch] = {
    one.__name__: one
    for one in (
        reads_one_position_less,
        turns_by_the_next_position,
        writes_one_position_late,
        every_rank_keeps_the_first_heads,
        gives_a_block_to_two,
        forgets_a_sum,
        sees_padding,
        forgets_the_cap,
        forgets_the_window,
    )
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Make a mistake while the context is open."""
    with pytest.MonkeyPatch.context() as patch:
        MISTAKES[name](patch)
        yield


def write_with_mistake(context: RankContext, argument: Any) -> Written:
    """Write as `targets.write` does, with the mistake that is named."""
    with planted(argument["mistake"]):
        return write(context, argument)
