"""One of something is not several, wherever a message says it."""

from __future__ import annotations

import pytest

from echelon.core.messages.plurals import NUMBERED, VERBS, WORDS, in_singular
from echelon.core.rulebook import all_rules
from echelon.core.rulebook.mesh import FITS_CLUSTER


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("1 ranks", "1 rank"),
        (
            "the mesh is pp 1 = 1 ranks, but it has 1 devices",
            "the mesh is pp 1 = 1 rank, but it has 1 device",
        ),
        ("1 data ranks have 1 batches", "1 data rank has 1 batch"),
        ("1 passes of 1 microbatches are left", "1 pass of 1 microbatch is left"),
        ("mesh.dp_replicate = 1: 1 ranks / 1", "mesh.dp_replicate = 1: 1 rank / 1"),
        ("(1 processes)", "(1 process)"),
    ],
)
def test_one_is_singular(text: str, shown: str) -> None:
    assert in_singular(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        *("11 ranks", "1,001 ranks", "0.1 seconds", "2.1 tokens", "2 1 microbatches", "1F1B"),
        *(
            "p + 1 microbatches",
            "1 to 1 ranks",
            "k > 1 nodes",
            "1 of 4 ranks",
            "step 1/3 tokens",
            "x=1 steps",
        ),
        *(f"{word} 1 runs" for word in NUMBERED),
    ],
)
def test_other_numbers_and_names_stay(text: str) -> None:
    assert in_singular(text) == text


def test_every_noun_is_a_plural_and_every_verb_is_one_of_several() -> None:
    for noun in WORDS:
        assert in_singular(f"on 1 {noun}") in (f"on 1 {noun[:-1]}", f"on 1 {noun[:-2]}")
        assert in_singular(f"on 2 {noun}") == f"on 2 {noun}"
    for several, single in VERBS.items():
        assert in_singular(f"1 ranks {several} here") == f"1 rank {single} here"


def test_problems_of_rules_pass_through() -> None:
    problem = FITS_CLUSTER.problem("1 ranks on 1 devices", suggestions=("1 nodes",))
    assert (problem.message, problem.suggestions) == ("1 rank on 1 device", ("1 node",))
    assert all(in_singular(rule.why) == rule.why for rule in all_rules())
