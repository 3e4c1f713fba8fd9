"""Masks, positions, heads and scales of attention calls are told beside those of one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from echelon.proof.causes.finding import ProofFinding
from echelon.proof.causes.passing.attention import explain_attention
from echelon.proof.evidence.run import AttentionArguments, Passed
from tests.proof.causes.passing.passes import evidence_of_passes, one_device

SEQUENCES, HEADS, KEY_HEADS, TOKENS, WIDTH = 4, 4, 2, 6, 8
CAUSAL = torch.ones(TOKENS, TOKENS).tril().bool()
DOCUMENTS = CAUSAL & ((torch.arange(TOKENS) >= 4)[:, None] == (torch.arange(TOKENS) >= 4))
PADDED = CAUSAL & (torch.arange(TOKENS) != 5)

Change = Callable[[int, AttentionArguments], AttentionArguments]


def rotated(x_BHTd: torch.Tensor, places_T: torch.Tensor) -> torch.Tensor:
    first, second = x_BHTd.chunk(2, -1)
    angles = places_T[:, None] / 10.0 ** torch.arange(first.shape[-1])
    cos, sin = angles.cos().double(), angles.sin().double()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


def right_call(allowed: torch.Tensor) -> AttentionArguments:
    made = torch.Generator().manual_seed(2)
    shapes = [(SEQUENCES, h, TOKENS, WIDTH) for h in (HEADS, KEY_HEADS, KEY_HEADS)]
    q, k, v = (torch.randn(shape, generator=made, dtype=torch.float64) for shape in shapes)
    return AttentionArguments(
        step=0, name="a", call=0, q_BHTd=q, k_BHSd=k, v_BHSd=v, allowed=allowed, scale=0.5
    )


def explained(
    change: Change, allowed: torch.Tensor = CAUSAL, axis: str = "dp"
) -> ProofFinding | None:
    right, reference = right_call(allowed), one_device()
    reference.passed.attention.append(right)
    ranks = [Passed(attention=[change(rank, right)]) for rank in range(2)]
    return explain_attention(evidence_of_passes(reference, ranks, mesh={axis: 2}), 0)


def own(rank: int, one: AttentionArguments, *, dim: int = 0) -> AttentionArguments:
    """Return the part of a rank: of the sequences, the heads, or the queries."""
    q = one.q_BHTd.chunk(2, dim)[rank]
    others = (one.k_BHSd, one.v_BHSd) if dim == 2 else (one.k_BHSd.chunk(2, dim)[rank],) * 2
    mask = one.allowed.chunk(2, 0)[rank] if dim == 2 else one.allowed
    return replace(one, q_BHTd=q, k_BHSd=others[0], v_BHSd=others[1], allowed=mask)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_right_parts_are_right(dim: int) -> None:
    assert explained(lambda rank, one: own(rank, one, dim=dim), axis="x") is None


MASKS = {
    "documents see one another": (DOCUMENTS, CAUSAL),
    "padding in the softmax": (PADDED, CAUSAL),
    "causal mask": (CAUSAL, torch.ones(TOKENS, TOKENS).bool()),
    "attention cut": (CAUSAL, DOCUMENTS),
}


@pytest.mark.parametrize("factor", MASKS)
def test_a_wrong_mask_has_a_name(factor: str) -> None:
    right, wrong = MASKS[factor]
    found = explained(lambda rank, one: replace(own(rank, one), allowed=wrong), right)
    assert found is not None
    assert (found.factor, found.tensor, found.ranks) == (factor, "a", (0, 1))


@pytest.mark.parametrize("shape", [(HEADS,), (1, HEADS)], ids=["heads", "sequences and heads"])
def test_a_mask_of_each_head_is_read(shape: tuple[int, ...]) -> None:
    right = CAUSAL.expand(*shape, -1, -1)
    assert explained(own, right) is None
    found = explained(lambda rank, one: replace(own(rank, one), allowed=DOCUMENTS), right)
    assert found is not None
    assert found.factor == "attention cut"


def test_rotations_tell_positions() -> None:
    reset = torch.tensor([0, 1, 2, 3, 0, 1])

    def running_on(rank: int, one: AttentionArguments) -> AttentionArguments:
        mine = own(rank, one)
        return replace(mine, q_BHTd=rotated(mine.q_BHTd, torch.arange(TOKENS) - reset))

    found = explained(running_on, DOCUMENTS)
    assert found is not None
    assert (found.factor, found.value) == ("positions not reset", 4.0)

    def from_zero(rank: int, one: AttentionArguments) -> AttentionArguments:
        mine = own(rank, one, dim=2)
        return replace(mine, q_BHTd=rotated(mine.q_BHTd, torch.full((3,), -3.0 * rank)))

    found = explained(from_zero, axis="cp")
    assert found is not None
    assert (found.factor, found.axis, found.ranks) == ("positions of a part", "cp", (1,))


def test_heads_and_keys_may_be_cut_wrongly() -> None:
    def swapped(rank: int, one: AttentionArguments) -> AttentionArguments:
        mine = own(rank, one)
        return replace(mine, k_BHSd=mine.k_BHSd.flip(1))

    found = explained(swapped)
    assert found is not None
    assert found.factor == "attention cut"

    def own_keys(rank: int, one: AttentionArguments) -> AttentionArguments:
        mine = own(rank, one, dim=2)
        k = one.k_BHSd.chunk(2, 2)[rank]
        return replace(mine, k_BHSd=k, v_BHSd=k, allowed=CAUSAL[:3, :3])

    found = explained(own_keys, axis="cp")
    assert found is not None
    assert (found.factor, found.axis) == ("attention cut", "cp")
    repeated = explained(
        lambda rank, one: replace(one, k_BHSd=one.k_BHSd.repeat_interleave(2, 1), v_BHSd=one.v_BHSd)
    )
    assert repeated is None


def test_scores_may_be_multiplied() -> None:
    found = explained(lambda rank, one: replace(own(rank, one), scale=1.0))
    assert found is not None
    assert (found.factor, found.value) == ("multiplier", 2.0)
