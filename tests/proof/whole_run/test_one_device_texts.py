"""The texts of a whole run: an epoch ends within a step, and no last sample is full."""

from __future__ import annotations

from itertools import accumulate, pairwise

from echelon.proof.independent.samples import read_row
from echelon.proof.shrink import shrink
from echelon.proof.whole_run.one_device import END_OF_DOCUMENT, PROMPTS, num_samples_of, texts_for
from tests.proof.layouts import layout

PLAN = shrink(layout(dp=2), precision="fp64")


def test_an_epoch_ends_inside_of_the_second_step() -> None:
    tokens = texts_for(PLAN).training_tokens
    count = PLAN.mathematics.global_sequences
    assert count < num_samples_of(PLAN, tokens) < 2 * count
    assert (len(tokens) - 1) % PLAN.mathematics.sequence_length


def test_validation_takes_a_second_batch_that_is_not_full() -> None:
    tokens = texts_for(PLAN).validation_tokens
    assert num_samples_of(PLAN, tokens) == PLAN.mathematics.global_sequences + 1


def test_the_held_out_part_begins_where_a_document_does() -> None:
    texts = texts_for(PLAN)
    every = texts.training_tokens + texts.validation_tokens
    wanted = round(len(every) * texts.argument("")["validation_fraction"])
    assert wanted == len(texts.validation_tokens)
    ends = list(accumulate(token == END_OF_DOCUMENT for token in every))
    assert ends[len(texts.training_tokens) - 1] == len(texts.training)


def test_ends_of_documents_are_at_both_ends_of_a_sample_and_in_a_row() -> None:
    """Two documents are empty: of ends in a row only the last starts a document."""
    texts, length = texts_for(PLAN), PLAN.mathematics.sequence_length
    for tokens in (texts.training_tokens, texts.validation_tokens):
        first = [read_row(tokens, sample, length, END_OF_DOCUMENT) for sample in range(2)]
        assert first[0].tokens[2:4] == [END_OF_DOCUMENT, END_OF_DOCUMENT]
        assert first[0].documents == (0, 4)
        assert first[0].tokens[-1] == first[1].tokens[0] == END_OF_DOCUMENT
        assert first[1].documents[:2] == (0, 1)
    ends = [[token == END_OF_DOCUMENT for token in prompt] for prompt in PROMPTS]
    assert any(one[0] for one in ends)
    assert any(one[-1] for one in ends)
    assert any((True, True) in pairwise(one) for one in ends)


def test_the_seed_decides_the_texts() -> None:
    assert texts_for(PLAN) == texts_for(PLAN)
