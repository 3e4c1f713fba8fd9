"""Our trainer with a bug in its loop, its data or its checkpoints: what ranks call in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from echelon.inference.cache import CachedSequence
from echelon.launch.context import RankContext
from echelon.parallel.fp8_scales import TensorScales
from echelon.training import loop, whole_run
from echelon.training.data.batches import GlobalBatch, sample_ids
from echelon.training.loop import TrainLoop
from echelon.training.optimizer import SliceOptimizer
from tests.inference.mistakes import reads_one_position_less

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
