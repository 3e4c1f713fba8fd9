"""What readers share: names without their wrappers, the moment of a weight."""

from __future__ import annotations

from pathlib import Path

from echelon.training.weights.stored import whole
from echelon.training.weights.trainers.contents import moment_of, some, unwrapped

TENSOR = whole(Path("a"), 0, "F32", (2,))


def test_only_our_own_names_lose_a_wrapper() -> None:
    ours = {"module.embedding.weight": TENSOR, "module.norm.weight": TENSOR}
    assert set(unwrapped(ours)) == {"embedding.weight", "norm.weight"}
    theirs = {"model.embed_tokens.weight": TENSOR}
    assert unwrapped(theirs) == theirs


def test_a_moment_is_found_with_a_wrapper_and_without() -> None:
    assert moment_of({"a.weight": TENSOR}, "model.a.weight") is TENSOR
    assert moment_of({"module.a.weight": TENSOR}, "a.weight") is TENSOR
    assert moment_of({"b.weight": TENSOR}, "a.weight") is None


def test_long_lists_are_counted() -> None:
    assert some(range(6)) == "0, 1, 2, 3 and 2 more"
