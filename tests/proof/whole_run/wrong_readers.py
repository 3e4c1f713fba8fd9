"""The trainer's reading of its data with a bug: what a rank calls in place of the right one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from echelon.training import delivered
from echelon.training.data import batches, prepare, records
from echelon.training.data.chats import ChatEncoder
from echelon.training.data.dataset import TokenDataset
from echelon.training.data.mixed_dataset import Mixture
from echelon.training.data.records import DocumentChunk
from echelon.training.data.sources import SourceFile
from echelon.training.loop import TrainLoop
from tests.proof.whole_run.wrong_trainers import planted


@planted(delivered.deliver)
def mask_of_answers_is_shifted(patch: pytest.MonkeyPatch) -> None:
    """Take the mask of a token for the mask of its label."""
    right = TokenDataset._answers

    def shifted(self: TokenDataset, start: int, stop: int) -> Any:
        return np.concatenate([right(self, start - 1, start), right(self, start, stop)[:-1]])

    patch.setattr(TokenDataset, "_answers", shifted)


@planted(delivered.deliver)
def questions_are_answers(patch: pytest.MonkeyPatch) -> None:
    """Count every token of a prompt with its completion."""
    right = ChatEncoder._completed

    def all_of_it(self: ChatEncoder, prompt: str, text: str, *, special: bool) -> Any:
        chat = right(self, prompt, text, special=special)
        return replace(chat, answers=chat.answers | True)

    patch.setattr(ChatEncoder, "_completed", all_of_it)


@planted(delivered.deliver)
def held_out_documents_are_trained_on(patch: pytest.MonkeyPatch) -> None:
    """Leave the held-out part in the training part."""
    right = TokenDataset.split
    patch.setattr(TokenDataset, "split", lambda self, part: (self, right(self, part)[1]))


@planted(delivered.deliver)
def held_out_part_is_the_head(patch: pytest.MonkeyPatch) -> None:
    """Hold out as many tokens at the start of the text as there are to be at its end."""
    right = TokenDataset.split

    def turned(self: TokenDataset, part: float) -> Any:
        cut = right(self, part)[1].num_tokens
        return replace(self, start=cut), replace(self, stop=cut)

    patch.setattr(TokenDataset, "split", turned)


@planted(delivered.deliver)
def phases_change_a_step_late(patch: pytest.MonkeyPatch) -> None:
    """Go on with the weights of a phase in the first step of the next one."""
    right = Mixture.sequences

    def late(self: Mixture, *, step: int, count: int) -> Any:
        phases = tuple(
            replace(phase, until_step=phase.until_step and phase.until_step + 1)
            for phase in self.phases
        )
        return right(replace(self, phases=phases), step=step, count=count)

    patch.setattr(Mixture, "sequences", late)


@planted(delivered.deliver)
def last_document_is_dropped(patch: pytest.MonkeyPatch) -> None:
    """Prepare all documents but the last."""
    right = prepare._ChunkReader.__iter__

    def without_last(self: Any) -> Iterator[Any]:
        yield from list(right(self))[:-1]

    patch.setattr(prepare._ChunkReader, "__iter__", without_last)


@planted(delivered.deliver)
def samples_begin_a_token_late(patch: pytest.MonkeyPatch) -> None:
    """Read each sample from its second token on."""
    right = TokenDataset.tokens
    patch.setattr(TokenDataset, "tokens", lambda self, a, b: right(self, a + 1, b + 1))


@planted(delivered.deliver)
def documents_of_chats_start_at_ends(patch: pytest.MonkeyPatch) -> None:
    """Take ends of answers for ends of chats."""
    patch.setattr(TokenDataset, "shows_ends", property(lambda self: True))


@planted(delivered.deliver)
def epochs_are_not_padded(patch: pytest.MonkeyPatch) -> None:
    """Go on with the next epoch whatever the run says."""
    right = batches.training_batch

    def going_on(*args: Any, epoch_end: str = "", **flags: Any) -> Any:
        return right(*args, **flags)

    patch.setattr("echelon.training.loop.training_batch", going_on)


@planted(delivered.deliver)
def padded_tokens_are_counted_as_if_they_were_not(patch: pytest.MonkeyPatch) -> None:
    """Count the tokens of a step by the samples of an epoch that goes on."""

    def count(self: TrainLoop, step: int) -> int:
        seed = self.job.plan.mathematics.seed
        return batches.training_batch(self.training, self.layout, seed=seed, step=step).num_valid

    patch.setattr(TrainLoop, "num_tokens", count)


@planted(delivered.deliver)
def pieces_of_a_text_are_documents(patch: pytest.MonkeyPatch) -> None:
    """End a document where a piece of a long text ends."""
    right = records._read_text

    def ended(file: SourceFile, most: int) -> Iterator[DocumentChunk]:
        yield from (DocumentChunk(piece.text, last=True) for piece in right(file, most))

    patch.setattr(records, "_read_text", ended)


@planted(delivered.deliver)
def shards_are_read_on_from_where_the_last_began(patch: pytest.MonkeyPatch) -> None:
    """Read of the next shard from the place in the shard before."""

    def tokens(self: TokenDataset, start: int, stop: int) -> Any:
        start, stop = (min(self.start + place, self.stop) for place in (start, stop))
        shards = np.searchsorted(self._shard_starts[:-1], start, side="right")
        shard = int(shards) - 1
        begin = start - int(self._shard_starts[shard])
        parts = [self._shards[shard][begin : begin + stop - start]]
        while (left := stop - start - sum(map(len, parts))) > 0:
            shard += 1
            first = min(begin, len(self._shards[shard]) - left)
            parts.append(self._shards[shard][first : first + left])
        return np.concatenate(parts).astype(np.int64)

    patch.setattr(TokenDataset, "tokens", tokens)


@planted(delivered.deliver)
def rows_behind_the_first_are_skipped(patch: pytest.MonkeyPatch) -> None:
    """Read of a batch of a table as many rows as are read at a time."""
    right = records._rows

    def first(batches: Iterator[Any], field: str, file: SourceFile, most: int) -> Any:
        return right((batch.slice(0, most) for batch in batches), field, file, most)

    patch.setattr(records, "_rows", first)


@planted(delivered.deliver)
def documents_of_a_part_are_those_of_the_head(patch: pytest.MonkeyPatch) -> None:
    """Look for ends of chats as if the held-out part began where the text does."""
    right = TokenDataset.document_starts

    def of_head(self: TokenDataset, ids: Any, inputs: Any) -> Any:
        return right(self if self.shows_ends else replace(self, start=0), ids, inputs)

    patch.setattr(TokenDataset, "document_starts", of_head)


@planted(delivered.deliver)
def sources_begin_anew_in_each_phase(patch: pytest.MonkeyPatch) -> None:
    """Count the sequences that a source gave from the start of the phase."""
    right = Mixture.sequences

    def anew(self: Mixture, *, step: int, count: int) -> Any:
        ends = [phase.until_step or 0 for phase in self.phases]
        start = max(end for end in ends if end <= step)
        sources, numbers = right(self, step=step, count=count)
        return sources, numbers - self.given(steps=start, count=count)[sources]

    patch.setattr(Mixture, "sequences", anew)
