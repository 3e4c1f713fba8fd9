"""The run on one device: every label of the text once, and text that is greedy."""

from __future__ import annotations

from dataclasses import replace

from echelon.proof.shrink import shrink
from echelon.proof.whole_run.one_device import (
    VOCABULARY,
    continuation,
    run_on_one_device,
    texts_for,
)
from tests.proof.layouts import layout

SMALL = shrink(layout(dp=2), precision="fp64")
MODEL = replace(SMALL.model, vocab=VOCABULARY)
PLAN = replace(SMALL, mathematics=replace(SMALL.mathematics, model=MODEL))


def test_every_label_of_an_epoch_counts_once() -> None:
    texts = texts_for(PLAN)
    run = run_on_one_device(PLAN, texts, 2, validated_after=(0, 2))
    size = PLAN.mathematics.global_sequences * PLAN.mathematics.sequence_length
    # The last sample of the epoch is half full.
    assert (
        sum(step.tokens for step in run.steps) == 2 * size - PLAN.mathematics.sequence_length // 2
    )
    assert list(run.validations) == [0, 2]


def test_text_goes_on_from_its_own_tokens() -> None:
    run = run_on_one_device(PLAN, texts_for(PLAN), 1, validated_after=())
    four = continuation(PLAN, run, list(b"the"), 4)
    assert four[2:] == continuation(PLAN, run, [*b"the", *four[:2]], 2)
