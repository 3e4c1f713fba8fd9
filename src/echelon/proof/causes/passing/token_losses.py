# SPDX-License-Identifier: Apache-2.0
"""What a wrong loss is of, label by label: which labels count, over which classes.

The loss of each label on one device says which label of the batch a label of a rank is: in float64
no two are alike but by chance, and a right forward pass gives the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as fn

from echelon.proof.causes.factors import mean_of_means
from echelon.proof.causes.finding import ProofFinding
from echelon.proof.claims.checks import Check
from echelon.proof.evidence.evidence import CapturedEvidence
from echelon.proof.evidence.mesh import NamedMesh
from echelon.proof.evidence.run import CountedTokens

_MOST_LABELS = 2**20  # of a step, above which none are matched
_MOST_DIVISOR = 4096  # labels: any number is near to some whole one beyond
_PARTS = 3  # dims of (sequences, tokens, width)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedLabels:
    """Hold the labels of one step: of one device, with its losses, and those of each rank."""

    evidence: CapturedEvidence
    step: int
    whole: CountedTokens
    ranks: Mapping[int, tuple[CountedTokens, ...]]

    @property
    def losses(self) -> torch.Tensor:
        """Return the loss of each label of one device, in the order of the batch; NaN: ignored."""
        found = torch.full(self.whole.labels_n.shape, torch.nan, dtype=torch.float64)
        found[self.whole.labels_n != self.whole.ignored] = self.whole.token_losses()
        return found

    def alike(self, value: float, wanted: float) -> bool:
        """Return whether two losses are the same but for rounding."""
        return abs(value - wanted) <= self.evidence.explained * abs(wanted)

    def found(self, losses: torch.Tensor) -> torch.Tensor | None:
        """Return which labels of one device have these losses; None where one is of no label."""
        mine = self.losses
        counted = (~mine.isnan()).nonzero().reshape(-1)
        values, order = mine[counted].sort()
        limit = self.evidence.explained * values.abs().clamp(min=self.evidence.explained)
        seen = torch.zeros(mine.shape, dtype=torch.bool)
        first = torch.searchsorted(values, losses - limit.max())
        last = torch.searchsorted(values, losses + limit.max(), right=True)
        if bool((last <= first).any()):
            return None
        for start, end in zip(first.tolist(), last.tolist(), strict=True):
            seen[counted[order[start:end]]] = True
        return seen


def explain_token_losses(evidence: CapturedEvidence, failure: Check) -> ProofFinding | None:
    """Return which labels, classes or weights make a loss wrong; None where it is something else.

    Nothing is told where one device or a rank was not seen taking a cross-entropy of whole logits.
    """
    mine = [one for one in evidence.passed.tokens if one.step == failure.step]
    if len(mine) != 1 or mine[0].logits_nV is None or mine[0].labels_n.numel() > _MOST_LABELS:
        return None
    ranks = {
        capture.rank: tuple(one for one in capture.passed.tokens if one.step == failure.step)
        for capture in evidence.run.captures
    }
    labels = CountedLabels(
        evidence=evidence,
        step=failure.step,
        whole=mine[0],
        ranks={rank: every for rank, every in ranks.items() if every},
    )
    return next(_findings(labels, failure), None)


def _findings(labels: CountedLabels, failure: Check) -> Iterator[ProofFinding]:
    yield from _padding(labels, failure)
    every = [one for tokens in labels.ranks.values() for one in tokens]
    if not every or any(one.logits_nV is None for one in every):
        return
    seen = {
        rank: [labels.found(one.token_losses()) for one in tokens]
        for rank, tokens in labels.ranks.items()
    }
    if any(one is None for calls in seen.values() for one in calls):
        yield from _multiplied(labels, failure)
        yield from _other_labels(labels, failure)
        return
    by_rank = {
        rank: torch.stack([one for one in calls if one is not None]).any(0)
        for rank, calls in seen.items()
    }
    yield from _missing_labels(labels, by_rank, failure)
    yield from _another_mean(labels, failure)
    yield from _another_count(labels, failure)


def _padding(labels: CountedLabels, failure: Check) -> Iterator[ProofFinding]:
    """Find classes that one device does not have in the denominator of the softmax."""
    whole, every = labels.whole, [one for tokens in labels.ranks.values() for one in tokens]
    classes = whole.num_classes
    axis = _axis_of_classes(labels.evidence, classes)
    wider = sorted({one.num_classes for one in every if one.num_classes > classes})
    if wider and all(one.logits_nV is not None for one in every):
        if all(labels.found(one.token_losses()) is not None for one in every):
            return  # masked
        cut = [labels.found(one.token_losses(classes)) for one in every]
        if all(one is not None for one in cut):
            yield _padded(failure, classes, wider[0], axis)
        return
    value = labels.evidence.run.loss(labels.step)
    mesh, logits = labels.evidence.mesh, whole.logits_nV
    right = labels.evidence.steps[labels.step].loss
    if (
        value is None
        or logits is None
        or not labels.alike(float(whole.token_losses().mean()), right)
    ):
        return
    for axes in mesh.axis_sets():
        missing = -classes % mesh.degree(axes)
        if missing and not every:
            padded = fn.pad(logits.double(), (0, missing))
            loss = fn.cross_entropy(padded, whole.labels_n, ignore_index=whole.ignored)
            if labels.alike(value, float(loss)):
                yield _padded(failure, classes, classes + missing, axis or " and ".join(axes))


def _padded(failure: Check, classes: int, wider: int, axis: str) -> ProofFinding:
    says = f"{failure.detail}: the softmax is over {wider} classes, and one device has {classes}; "
    says += "without the others, which are padding, it is right"
    return ProofFinding("padding in the softmax", says, axis)


def _axis_of_classes(evidence: CapturedEvidence, classes: int) -> str:
    """Return the axes over which the rows of the parameters with a row for each class are cut."""
    for name, shape in reversed(list(evidence.run.shapes.items())):
        if shape and shape[0] == classes and (cut := evidence.run.split_axes(name)[0]):
            return " and ".join(cut)
    return ""


def _missing_labels(
    labels: CountedLabels, by_rank: Mapping[int, torch.Tensor], failure: Check
) -> Iterator[ProofFinding]:
    """Find labels of one device that are in no rank's loss, and where they are in a sequence."""
    counted = ~labels.losses.isnan()
    missing = counted & ~torch.stack(list(by_rank.values())).any(0)
    if not bool(missing.any()):
        return
    told = f"{failure.detail}: {int(missing.sum())} of {int(counted.sum())} labels"
    mesh = labels.evidence.mesh
    for axis in mesh.axes:
        if torch.equal(missing, counted & _boundaries(labels, mesh.degrees[axis])):
            says = f"{told}, the last of each part of a sequence but the last part, are in no "
            says += f"rank's loss: labels are shifted after sequences are split over {axis}"
            yield ProofFinding("boundary labels missing", says, axis)
    same = [axis for axis in mesh.axes if _all_alike(labels, by_rank, axis)]
    if same and int(missing.sum()) * max(mesh.degrees[axis] for axis in same) >= int(counted.sum()):
        axis = " or ".join(same)
        says = f"{told} are in no rank's loss, and all ranks along {axis} have the same ones: they "
        yield ProofFinding("same data", says + "read the same rows", axis)
    yield ProofFinding("missing labels", f"{told} are in no rank's loss, the others are right")


def _all_alike(labels: CountedLabels, by_rank: Mapping[int, torch.Tensor], axis: str) -> bool:
    """Return whether ranks that differ in one axis only have the same labels."""
    groups = [labels.evidence.mesh.group(rank, (axis,)) for rank in by_rank]
    return all(
        other in by_rank and torch.equal(by_rank[other], by_rank[group[0]])
        for group in groups
        for other in group
    )


def _other_labels(labels: CountedLabels, failure: Check) -> Iterator[ProofFinding]:
    """Find right logits with labels that are not those of one device."""
    whole = labels.whole.logits_nV
    assert whole is not None, "looked at before"
    wrong, of = 0, 0
    for tokens in labels.ranks.values():
        for one in tokens:
            mine = _rows_of(one.logits_nV, whole, labels.evidence.explained)
            if mine is None:
                return
            of += one.labels_n.numel()
            wrong += int((labels.whole.labels_n[mine] != one.labels_n).sum())
    if wrong:
        says = f"{failure.detail}: the logits are right, and {wrong} of {of} labels on the ranks "
        yield ProofFinding("other labels", says + "are not those of one device")


def _multiplied(labels: CountedLabels, failure: Check) -> Iterator[ProofFinding]:
    """Find logits that are those of one device, times a number."""
    whole_nV, factors = labels.whole.logits_nV, list[torch.Tensor]()
    assert whole_nV is not None, "looked at before"
    lengths = whole_nV.double().norm(dim=1, keepdim=True)
    for one in (one for tokens in labels.ranks.values() for one in tokens):
        assert one.logits_nV is not None, "looked at before"
        own = one.logits_nV.double().norm(dim=1, keepdim=True)
        rows = _rows_of(one.logits_nV.double() / own, whole_nV / lengths, labels.evidence.explained)
        if rows is None:
            return
        factors.append(own[:, 0] / lengths[rows, 0])
    every = torch.cat(factors)
    factor = float(every.median())
    if bool(((every / factor - 1).abs() <= labels.evidence.explained).all()) and factor != 1:
        says = (
            f"{failure.detail}: logits are {factor:.6g} times those of one device, before the loss"
        )
        yield ProofFinding("multiplier", says, value=factor)


def _rows_of(
    logits_nV: torch.Tensor | None, whole_nV: torch.Tensor, fits: float
) -> torch.Tensor | None:
    """Return which rows of one device's logits a rank has; None where one is none of them."""
    if logits_nV is None or logits_nV.shape[1] != whole_nV.shape[1]:
        return None
    distance, nearest = torch.cdist(logits_nV.double(), whole_nV.double()).min(1)
    return nearest if bool((distance <= fits * whole_nV.norm(dim=1).max()).all()) else None


def _boundaries(labels: CountedLabels, parts: int) -> torch.Tensor:
    """Return the last label of each of so many parts of every sequence, but of the last part."""
    found = torch.zeros(labels.whole.labels_n.shape, dtype=torch.bool)
    shapes = [one.values.shape for one in labels.evidence.passed.tensors]
    lengths = {s[1] for s in shapes if len(s) == _PARTS and s[0] * s[1] == found.numel()}
    if len(lengths) == 1 and (length := lengths.pop()) % parts == 0:
        rows = found.view(-1, length)
        rows[:, length // parts - 1 : length - 1 : length // parts] = True
    return found


def _another_mean(labels: CountedLabels, failure: Check) -> Iterator[ProofFinding]:
    """Find a mean of the means of ranks, and of their microbatches, all labels being right."""
    own = {r: [one.token_losses() for one in tokens] for r, tokens in labels.ranks.items()}
    counts = {rank: sum(one.numel() for one in losses) for rank, losses in own.items()}
    sums = [(float(one.sum()), one.numel()) for losses in own.values() for one in losses]
    run, axis = labels.evidence.run, " and ".join(_axes_of_counts(labels.evidence.mesh, counts))
    value, right = run.loss(labels.step), labels.evidence.steps[labels.step].loss
    of_ranks = [("ranks and microbatches", axis, sums)]
    for finding in mean_of_means(value or 0.0, right, of_ranks, labels.evidence.explained):
        says = f"{failure.detail}: the loss of every label is right, and this is "
        yield replace(finding, description=says + finding.description)


def _another_count(labels: CountedLabels, failure: Check) -> Iterator[ProofFinding]:
    """Find by what each rank divides the sum of its labels' losses: its own number, or another."""
    run, mesh = labels.evidence.run, labels.evidence.mesh
    told = {rank: one.loss for rank, one in enumerate(run.reports(labels.step))}
    weights, counts = dict[int, float](), dict[int, int]()
    for rank, tokens in labels.ranks.items():
        own = torch.cat([one.token_losses() for one in tokens])
        loss = told.get(rank)
        if loss is None or not float(own.sum()):
            return
        weights[rank], counts[rank] = loss / float(own.sum()), own.numel()
    first = min(weights)
    by_own = [labels.alike(weights[r] * counts[r], weights[first] * counts[first]) for r in weights]
    if all(by_own) and len(set(counts.values())) > 1:
        differ = _axes_of_counts(mesh, counts)
        each = ", ".join(str(count) for count in dict.fromkeys(counts.values()))
        says = f"{failure.detail}: the loss of every label is right, and each rank divides their "
        says += f"sum by the number of its own labels ({each})"
        yield ProofFinding("mean of means", says, " and ".join(differ))
    total = int((~labels.losses.isnan()).sum())
    right = labels.evidence.steps[labels.step].loss
    value = run.loss(labels.step)
    alike = all(labels.alike(one, weights[first]) for one in weights.values())
    if not alike or not value or total < 2:
        return
    divisor = round(total * right / value)
    if 0 < divisor <= _MOST_DIVISOR and labels.alike(value * divisor, total * right):
        says = f"{failure.detail}: the loss of every label is right, and their sum is divided by "
        says += f"{divisor}, where {total} labels count"
        yield ProofFinding("token count", says, value=total / divisor)


def _axes_of_counts(mesh: NamedMesh, counts: Mapping[int, int]) -> list[str]:
    """Return the axes along which ranks have other numbers of labels."""
    return [
        axis
        for axis in mesh.axes
        if any(counts.get(o) != n for r, n in counts.items() for o in mesh.group(r, (axis,)))
    ]
