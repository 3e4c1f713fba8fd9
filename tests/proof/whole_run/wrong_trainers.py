"""Our trainer with a bug in its loop, its data or its checkpoints: what ranks call in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from echelon.inference import generator
from echelon.inference.cache import CachedSequence, PagedCache
from echelon.inference.operations import CachedAttention, CacheOperations
from echelon.launch.context import RankContext
from echelon.models.decoder import MLP, Block
from echelon.parallel.fp8_scales import TensorScales
from echelon.training import loop, whole_run
from echelon.training.data.batches import GlobalBatch, sample_ids
from echelon.training.loop import TrainLoop
from echelon.training.optimizer import SliceOptimizer
from tests.inference.mistakes import (
    gives_a_block_to_two,
    reads_one_position_less,
    sees_padding,
    turns_by_the_next_position,
    writes_one_position_late,
)

Target = Callable[[RankContext, Mapping[str, Any]], None]


def planted(target: Target) -> Callable[[Callable[[pytest.MonkeyPatch], None]], Target]:
    """Return what makes a function, which plants a bug, a target in which it is planted."""

    def decorate(plant: Callable[[pytest.MonkeyPatch], None]) -> Target:
        def run(context: RankContext, argument: Mapping[str, Any]) -> None:
            with pytest.MonkeyPatch.context() as patch:
                plant(patch)
                target(context, argument)

        return run

    return decorate


@planted(whole_run.train)
def same_order_in_every_epoch(patch: pytest.MonkeyPatch) -> None:
    """Read the samples of every epoch in the order of the first."""

    def first_epoch(
        dataset: Any, layout: Any, *, seed: int, step: int, epoch_end: Any
    ) -> GlobalBatch:
        count = dataset.num_samples(layout.sequence_length)
        order = sample_ids(seed=seed, step=0, num_samples=count, count=count)
        size = layout.global_sequences
        places = np.arange(step * size, (step + 1) * size) % count
        return GlobalBatch(dataset=dataset, layout=layout, sample_ids=order[places])

    patch.setattr(loop, "training_batch", first_epoch)


@planted(whole_run.train)
def validation_is_a_mean_of_means(patch: pytest.MonkeyPatch) -> None:
    """Give the last validation batch, which is not full, the weight of the others."""
    patch.setattr(GlobalBatch, "num_valid", property(lambda self: 1))


@planted(whole_run.train)
def validation_drops_out(patch: pytest.MonkeyPatch) -> None:
    """Validate in the mode of training."""
    evaluate = TrainLoop.validate

    def dropping(self: TrainLoop, step: int) -> float:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr("echelon.training.engine.replace", lambda batch, **_: batch)
            made = self._batches
            inner.setattr(self, "_batches", lambda batch, *, step, train: made(batch, step=step))
            return evaluate(self, step)

    patch.setattr(TrainLoop, "validate", dropping)


@planted(whole_run.train)
def resumed_optimizer_counts_from_zero(patch: pytest.MonkeyPatch) -> None:
    """Resume without the number of updates that bias correction needs."""
    patch.setattr(SliceOptimizer, "set_num_steps", lambda self, count: None)


@planted(whole_run.train)
def resumed_scales_look_back_on_nothing(patch: pytest.MonkeyPatch) -> None:
    """Resume without the largest numbers that scales of whole tensors come from."""
    patch.setattr(TensorScales, "load", lambda self, state: None)


@planted(whole_run.train)
def resumed_run_reads_the_first_samples_again(patch: pytest.MonkeyPatch) -> None:
    """Resume with the samples of step 0."""
    load = TrainLoop.load

    def from_the_start(self: TrainLoop, step: int) -> Any:
        return load(self, step - 1 if self.task.resume is not None else step)

    patch.setattr(TrainLoop, "load", from_the_start)


@planted(whole_run.read_back)
def last_checkpoint_not_taken(patch: pytest.MonkeyPatch) -> None:
    """Read the checkpoint of the first run, from the middle, for the last one."""
    path = whole_run.checkpoint_path
    patch.setattr(
        whole_run,
        "checkpoint_path",
        lambda folder, step: path(folder.parents[1] / "run-0" / "checkpoints", 2),
    )


@planted(whole_run.read_back)
def text_from_the_first_token_only(patch: pytest.MonkeyPatch) -> None:
    """Continue the first token of the prompt, whatever follows it."""
    write = whole_run.continue_tokens

    def forgetful(decoder: Any, tokens: list[int], count: int, **rest: Any) -> list[int]:
        return write(decoder, tokens[:1], count, **rest)

    patch.setattr(whole_run, "continue_tokens", forgetful)


@planted(whole_run.read_back)
def cache_off_by_one_position(patch: pytest.MonkeyPatch) -> None:
    """Leave out the oldest key of the cache."""
    reads_one_position_less(patch)


@planted(whole_run.read_back)
def each_end_starts_a_document(patch: pytest.MonkeyPatch) -> None:
    """Start a document behind each of several ends in a row."""

    def behind_each(tokens_BT: Any, end: int) -> Any:
        return tuple(
            (0, *(int(t) + 1 for t in np.flatnonzero(row[:-1] == end))) for row in tokens_BT
        )

    patch.setattr("echelon.training.whole_run.document_starts", behind_each)


@planted(whole_run.read_back)
def documents_of_a_prompt_meet(patch: pytest.MonkeyPatch) -> None:
    """Read a prompt of separate documents as one, over a cache."""
    patch.setattr(CachedSequence, "document_starts", lambda self: [0])


@planted(whole_run.read_back)
def positions_of_a_cache_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Turn a token that is written by the position after its own."""
    turns_by_the_next_position(patch)


@planted(whole_run.read_back)
def cache_written_late(patch: pytest.MonkeyPatch) -> None:
    """Write keys one place behind their own."""
    writes_one_position_late(patch)


@planted(whole_run.read_back)
def cache_shared_by_two(patch: pytest.MonkeyPatch) -> None:
    """Give the same blocks of the cache to two texts."""
    gives_a_block_to_two(patch)


@planted(whole_run.read_back)
def cache_padded(patch: pytest.MonkeyPatch) -> None:
    """Meet the padding of shorter texts."""
    sees_padding(patch)


@planted(whole_run.read_back)
def keys_cached_without_rotary(patch: pytest.MonkeyPatch) -> None:
    """Write keys to the cache before they are turned."""
    attend = CacheOperations.attend

    def unturned(self: Any, q: Any, k: Any, v: Any, shape: Any, batch: Any, **rest: Any) -> Any:
        cos, sin = self.rotary_tables(shape, batch, q)
        back = self.rotate(k, cos, -sin)
        over, write = CacheOperations._over_cache, PagedCache.write

        def written(cache: PagedCache, layer: int, slots: Any, rows: Any) -> None:
            plain = torch.cat((back[:, 0].flatten(1), v[:, 0].flatten(1)), dim=1)
            write(cache, layer, slots, plain if len(rows) == len(plain) else rows)

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(PagedCache, "write", written)
            inner.setattr(CacheOperations, "_over_cache", over)
            return attend(self, q, k, v, shape, batch, **rest)

    patch.setattr(CacheOperations, "attend", unturned)


@planted(whole_run.read_back)
def last_piece_of_a_prompt_not_cached(patch: pytest.MonkeyPatch) -> None:
    """Leave the keys of the last two tokens of a prompt, or of its last one, out of the cache."""
    write = PagedCache.write

    def shorter(self: PagedCache, layer: int, slots: Any, rows: Any) -> None:
        write(self, layer, slots, rows)
        for start, length in self.pieces:  # type: ignore[attr-defined]
            first = start + (length - 1) // 2 * 2
            self.pools[layer][slots[first : start + length]] = 0.0

    made = generator.prompt_batch

    def prompts(caches: Any, sequences: Any) -> Any:
        batch = made(caches, sequences)
        starts = np.cumsum([0, *(len(one.tokens) for one in sequences)])
        for cache in caches.caches:
            cache.pieces = [
                (int(start), len(one.tokens)) for start, one in zip(starts, sequences, strict=False)
            ]
        return batch

    def following(caches: Any, sequences: Any) -> Any:
        for cache in caches.caches:
            cache.pieces = []
        return after(caches, sequences)

    after = generator.next_batch
    patch.setattr(generator, "prompt_batch", prompts)
    patch.setattr(generator, "next_batch", following)
    patch.setattr(PagedCache, "write", shorter)


@planted(whole_run.read_back)
def scores_unscaled_over_a_cache(patch: pytest.MonkeyPatch) -> None:
    """Forget the scale of scores where a token meets a cache."""
    of_next = CachedAttention.of_next

    def unscaled(self: CachedAttention, *heads: Any) -> Any:
        return of_next(replace(self, scale=1.0), *heads)

    patch.setattr(CachedAttention, "of_next", unscaled)


@planted(whole_run.read_back)
def mlp_of_a_token_doubled(patch: pytest.MonkeyPatch) -> None:
    """Add the MLP of a token that is written twice."""
    forward = MLP.forward

    def doubled(self: Any, x_ND: Any, batch: Any = None) -> Any:
        y_ND = forward(self, x_ND, batch)
        return y_ND if getattr(batch, "spans", True) else 2 * y_ND

    run = Block.forward

    def with_batch(self: Any, x_ND: Any, batch: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(MLP, "forward", lambda mlp, x, _=None: doubled(mlp, x, batch))
            return run(self, x_ND, batch)

    patch.setattr(Block, "forward", with_batch)
