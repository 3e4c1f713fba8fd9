"""Labels that are missing, classes too many and wrong means are told from the losses of labels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as fn

from echelon.proof.causes.finding import ProofFinding
from echelon.proof.causes.passing.token_losses import explain_token_losses
from echelon.proof.evidence.run import CountedTokens, Passed
from tests.proof.causes.passing.passes import (
    CLASSES,
    IGNORED,
    LOSS,
    SEQUENCES,
    TOKENS,
    evidence_of_passes,
    one_device,
)


def logits_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    (tokens,) = one_device().passed.tokens
    assert tokens.logits_nV is not None
    shape = (SEQUENCES, TOKENS)
    return tokens.logits_nV.unflatten(0, shape), tokens.labels_n.unflatten(0, shape)


def counted(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> CountedTokens:
    return CountedTokens(
        step=0,
        labels_n=labels_BT.flatten(),
        num_classes=logits_BTV.shape[-1],
        ignored=IGNORED,
        logits_nV=logits_BTV.flatten(0, 1),
    )


def told(
    ranks: Sequence[Sequence[CountedTokens]],
    loss: float | Sequence[float],
    *,
    axis: str = "cp",
    cut: bool = False,
) -> ProofFinding | None:
    evidence = evidence_of_passes(
        one_device(),
        [Passed(tokens=list(tokens)) for tokens in ranks],
        mesh={axis: 2},
        loss=loss,
        cut={"last.weight": 0} if cut else None,
    )
    return explain_token_losses(evidence, LOSS)


def halves(values: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
    return values.chunk(2, dim)


def test_labels_at_the_boundaries_of_the_cut() -> None:
    logits, labels = logits_and_labels()
    labels = labels.clone()
    labels[:, TOKENS // 2 - 1] = IGNORED
    ranks = [[counted(*both)] for both in zip(halves(logits, 1), halves(labels, 1), strict=True)]
    found = told(ranks, 1.0)
    assert found is not None
    assert (found.factor, found.axis) == ("boundary labels missing", "cp")
    assert "4 of 23 labels" in found.description


def test_other_labels_that_are_missing_are_no_boundaries() -> None:
    logits, labels = logits_and_labels()
    labels = labels.clone()
    labels[:, 0] = IGNORED
    ranks = [[counted(*both)] for both in zip(halves(logits, 1), halves(labels, 1), strict=True)]
    found = told(ranks, 1.0)
    assert found is not None
    assert (found.factor, found.axis) == ("missing labels", "")


def test_ranks_that_read_the_same_rows() -> None:
    logits, labels = logits_and_labels()
    same = counted(halves(logits, 0)[0], halves(labels, 0)[0])
    found = told([[same], [same]], 1.0, axis="dp")
    assert found is not None
    assert (found.factor, found.axis) == ("same data", "dp")


def test_a_mean_of_the_means_of_ranks() -> None:
    logits, labels = logits_and_labels()
    ranks = [[counted(*both)] for both in zip(halves(logits, 0), halves(labels, 0), strict=True)]
    mean = sum(float(one.token_losses().mean()) for tokens in ranks for one in tokens) / 2
    found = told(ranks, mean, axis="dp")
    assert found is not None
    assert (found.factor, found.axis) == ("mean of means", "dp")
    # Right labels and another number: nothing is made up.
    assert told(ranks, mean * 1.01, axis="dp") is None


def test_each_rank_divides_by_its_own_labels_or_by_another_number() -> None:
    logits, labels = logits_and_labels()
    ranks = [[counted(*both)] for both in zip(halves(logits, 0), halves(labels, 0), strict=True)]
    own = [one.token_losses() for tokens in ranks for one in tokens]
    assert len({len(one) for one in own}) == 2
    found = told(ranks, [2 * float(one.mean()) for one in own], axis="dp")
    assert found is not None
    assert (found.factor, found.axis) == ("mean of means", "dp")
    assert f"({len(own[0])}, {len(own[1])})" in found.description
    found = told(ranks, [2 * float(one.sum()) for one in own], axis="dp")
    assert found is not None
    assert (found.factor, found.value) == ("token count", float(sum(map(len, own))))
    found = told(ranks, [2 * float(one.sum()) / 17 for one in own], axis="dp")
    assert found is not None
    assert "divided by 17, where 23 labels count" in found.description
    assert told(ranks, [3.1 * float(one.sum()) for one in own], axis="dp") is None


def test_padding_that_takes_part_in_the_softmax() -> None:
    logits, labels = logits_and_labels()
    padded = fn.pad(logits, (0, 1), value=0.3)
    found = told([[counted(padded, labels)]] * 2, 1.0, axis="tp", cut=True)
    assert found is not None
    assert (found.factor, found.axis) == ("padding in the softmax", "tp")
    assert "over 8 classes, and one device has 7" in found.description
    # Where the program masks it, or its logits are others, it is not the padding.
    assert CLASSES == 7
    masked = fn.pad(logits, (0, 1), value=-torch.inf)
    found = told([[counted(masked, labels)]] * 2, 1.0, axis="tp", cut=True)
    assert found is None or found.factor != "padding in the softmax"
    assert told([[counted(padded * 1.1, labels)]] * 2, 1.0, axis="tp", cut=True) is None


def test_padding_of_zeros_is_told_from_the_loss_alone() -> None:
    logits, labels = logits_and_labels()
    padded = fn.pad(logits, (0, 1)).flatten(0, 1)
    loss = float(fn.cross_entropy(padded, labels.flatten()))
    found = told([[], []], loss, axis="tp")
    assert found is not None
    assert (found.factor, found.axis) == ("padding in the softmax", "tp")
    assert told([[], []], loss * 1.001, axis="tp") is None


def test_right_logits_with_other_labels() -> None:
    logits, labels = logits_and_labels()
    found = told([[counted(logits, labels.roll(1, 1))]] * 2, 1.0)
    assert found is not None
    assert (found.factor, found.axis) == ("other labels", "")
    assert "the logits are right" in found.description


def test_a_wrong_forward_pass_is_not_a_matter_of_labels() -> None:
    logits, labels = logits_and_labels()
    assert told([[counted(logits + 1.5 * logits.square(), labels)]] * 2, 1.0) is None
