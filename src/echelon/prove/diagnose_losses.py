"""What wrong losses look like: another microbatch's, a factor, or those of a known mistake."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean

import torch

from echelon.prove.batches import global_batch
from echelon.prove.checks import Evidence
from echelon.prove.context_parts import means_of_context
from echelon.prove.diagnosis import ROUNDING, Finding
from echelon.prove.factors import (
    close,
    furthest,
    known_factors,
    name_factor,
    tokens_of_replicas,
)
from echelon.prove.oracle import OracleStep, Slot, build_decoder, sums_by_slot, token_losses
from echelon.prove.stale import stale_variants
from echelon.prove.subject import GlobalBatch
from echelon.prove.variants import variants
from echelon.prove.variants_context import context_variants
from echelon.prove.variants_experts import expert_variants
from echelon.prove.variants_rows import row_variants

Losses = Mapping[Slot, float]

_SAME = 1e-7


def explain_microbatch_losses(evidence: Evidence, step: int) -> tuple[str, Finding]:
    """Return the tensor and the mistake behind wrong losses of microbatches."""
    oracle = evidence.oracle[step]
    said = evidence.observed.microbatch_losses(step)
    first = {slot: said[slot][0][0] for slot in oracle.microbatch_losses if slot in said}
    for slot, values in said.items():
        if any(abs(value - values[0][0]) > _SAME * abs(value) for value, _ in values):
            says = f"tensor ranks disagree on the loss of dp {slot[0]} microbatch {slot[1]}"
            return "", Finding(factor="replicas differ", says=says, axis="tp")
    if len(first) < len(oracle.microbatch_losses):
        return "", Finding(factor="missing", says="some microbatches have no loss", axis="pp")
    right = {slot: total for slot, (total, _) in oracle.microbatch_losses.items()}
    if all(close(first[slot] / right[slot], 1.0) for slot in right):
        return "", _miscounted(oracle, said) or Finding(factor="none", says=ROUNDING)
    for found in _explanations(evidence, oracle, first):
        return found
    says = "another forward pass: no factor, order or known mistake explains it"
    return "", Finding(factor="none", says=says)


def _miscounted(
    oracle: OracleStep, said: Mapping[Slot, Sequence[tuple[float, int]]]
) -> Finding | None:
    for slot, (_, right) in oracle.microbatch_losses.items():
        for _, count in said[slot]:
            if count != right:
                says = f"{count} valid tokens instead of {right} beside the right loss"
                return Finding(factor="token count", says=says, value=count / right)
    return None


def _explanations(
    evidence: Evidence, oracle: OracleStep, observed: Losses
) -> Iterator[tuple[str, Finding]]:
    right = {slot: total for slot, (total, _) in oracle.microbatch_losses.items()}
    ratios = [observed[slot] / right[slot] for slot in right]
    if all(close(ratio, ratios[0]) for ratio in ratios):
        yield "", name_factor(ratios[0], known_factors(evidence.plan, oracle))
    yield from _moved(right, observed)
    yield from _mixed_up(evidence, oracle, observed)
    yield from _known_mistakes(evidence, oracle, observed)


def _moved(right: Losses, observed: Losses) -> Iterator[tuple[str, Finding]]:
    """Find losses that are right, but of other microbatches or replicas."""
    source: dict[Slot, Slot] = {}
    for slot, value in observed.items():
        near = [other for other, total in right.items() if abs(total - value) <= _SAME * abs(total)]
        if not near:
            return
        source[slot] = near[0]
    moved = {slot: other for slot, other in source.items() if slot != other}
    if any(slot[0] != other[0] for slot, other in moved.items()):
        slot, other = next((s, o) for s, o in moved.items() if s[0] != o[0])
        says = f"dp {slot[0]} worked on the samples of dp {other[0]}"
        yield "", Finding(factor="same data", says=says, axis="dp")
    elif moved:
        told = ", ".join(f"{slot[1]} is {other[1]}" for slot, other in moved.items())
        says = f"microbatches in another order: {told}"
        yield "", Finding(factor="order", says=says, axis="microbatches")


def _mixed_up(
    evidence: Evidence, oracle: OracleStep, observed: Losses
) -> Iterator[tuple[str, Finding]]:
    """Find the activations of one microbatch beside the labels of another."""
    plan = evidence.reference_plan
    count = plan.num_microbatches
    batch = global_batch(plan, oracle.step)
    model = build_decoder(plan, oracle.before, routing=oracle.routing)
    with torch.no_grad():
        sums = [
            sums_by_slot(plan, one, token_losses(plan, model, one, oracle.step))
            for shift in range(count)
            for one in [_with_labels(evidence, batch, shift)]
        ]
    for dp_rank in range(plan.mesh.dp):
        pairs: list[tuple[int, int]] = []
        for microbatch in range(count):
            wanted = observed[dp_rank, microbatch]
            near = [
                (inputs, (inputs + shift) % count)
                for shift in range(count)
                for inputs in range(count)
                if abs(float(sums[shift][dp_rank, inputs][0]) - wanted) <= _SAME * abs(wanted)
            ]
            if not near:
                return
            pairs.append(near[0])
        if any(inputs != labels for inputs, labels in pairs):
            yield "", _name_pairs(pairs)
            return


def _name_pairs(pairs: list[tuple[int, int]]) -> Finding:
    told = ", ".join(f"{i} with the labels of {m}" for i, m in pairs if i != m)
    overwritten = len({inputs for inputs, _ in pairs}) < len(pairs)
    says = "a buffer was overwritten in flight" if overwritten else "taken in another order"
    return Finding(
        factor="stale" if overwritten else "order",
        says=f"activations of microbatch {told}: {says}",
        axis="pp",
    )


def _with_labels(evidence: Evidence, batch: GlobalBatch, shift: int) -> GlobalBatch:
    """Return the batch with the labels of microbatch m + shift beside the inputs of m."""
    plan = evidence.plan
    labels_BT = batch.labels_BT.view(
        plan.mesh.dp, plan.num_microbatches, plan.layout.microbatch_sequences, -1
    )
    rolled = labels_BT.roll(-shift, dims=1).reshape(batch.labels_BT.shape)
    return replace(batch, labels_BT=rolled)


def _known_mistakes(
    evidence: Evidence, oracle: OracleStep, observed: Losses
) -> Iterator[tuple[str, Finding]]:
    """Find a mistake that gives the losses of all microbatches, or of some beside right ones."""
    plan = evidence.reference_plan
    batch = global_batch(plan, oracle.step)
    slots = list(observed)
    wanted = torch.tensor([observed[slot] for slot in slots], dtype=torch.float64)
    right = torch.tensor([oracle.microbatch_losses[slot][0] for slot in slots]).double()
    fine = _same(right, wanted)
    known = known_factors(plan, oracle)
    tried = chain(
        stale_variants(evidence, oracle),
        row_variants(plan, oracle),
        context_variants(plan, oracle),
        expert_variants(plan, oracle),
        variants(plan, oracle, known),
    )
    for variant in tried:
        with torch.no_grad():
            losses_BT = token_losses(plan, variant.build(), batch, oracle.step)
        sums = sums_by_slot(plan, batch, losses_BT)
        found = torch.stack([sums[slot][0] for slot in slots])
        same = _same(found, wanted)
        if bool((same | fine).all()):
            residual = float(((found - wanted) / wanted).abs()[same].max())
            finding = replace(variant.finding, residual=residual)
            yield variant.tensor, _narrowed(finding, slots, fine)
            return


def _same(tried: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (tried - wanted).abs() < _SAME * wanted.abs()


def _narrowed(finding: Finding, slots: Sequence[Slot], fine: torch.Tensor) -> Finding:
    """Add the replicas that a mistake is limited to."""
    wrong = {slot[0] for slot, right in zip(slots, fine, strict=True) if not right}
    others = {slot[0] for slot in slots} - wrong
    if not others:
        return finding
    says = f"only on dp {sorted(wrong)}: {finding.says}"
    return replace(finding, says=says, axis=finding.axis or "dp")


def explain_loss(evidence: Evidence, step: int) -> Finding:
    """Return what is wrong with the loss of the global batch, its microbatches being right."""
    plan, oracle = evidence.plan, evidence.oracle[step]
    values = [report.loss for report in evidence.observed.reports(step)]
    wrong = furthest(values, oracle.loss)
    if close(wrong / oracle.loss, 1.0):
        return Finding(factor="none", says=ROUNDING)
    sums: dict[int, float] = {}
    means: list[float] = []
    for (dp_rank, _), (total, count) in oracle.microbatch_losses.items():
        sums[dp_rank] = sums.get(dp_rank, 0.0) + total
        means.append(total / count)
    tokens = tokens_of_replicas(oracle)
    replica_means = [sums[r] / tokens[r] for r in sorted(sums)]
    rows = [
        ("a mean of the means of all microbatches", sum(means) / len(means)),
        ("a mean of the means of the replicas", sum(replica_means) / len(replica_means)),
    ]
    for says, value in rows:
        if close(values[0] / value, 1.0):
            return Finding(factor="token ratio", says=says, axis="dp", value=value / oracle.loss)
    for rank, value in enumerate(values):
        for dp_rank, mean in enumerate(replica_means):
            if plan.mesh.dp > 1 and close(value / mean, 1.0):
                says = f"rank {rank} reports the mean of dp {dp_rank} alone"
                return Finding(
                    factor="missing sum", says=says, axis="dp", value=value / oracle.loss
                )
    told = _loss_of_context(evidence, oracle, values) if plan.mesh.cp > 1 else None
    return told or name_factor(wrong / oracle.loss, known_factors(plan, oracle))


def _loss_of_context(
    evidence: Evidence, oracle: OracleStep, values: Sequence[float]
) -> Finding | None:
    """Find a mean over context ranks, or that of one of them, in the place of the loss."""
    means = means_of_context(evidence.reference_plan, oracle)
    value = values[0] / oracle.loss
    if close(values[0] / fmean(means.values()), 1.0):
        says = "a mean of the means of the context ranks"
        return Finding(factor="token ratio", says=says, axis="cp", value=value)
    for rank, said in enumerate(values):
        for (_, cp), mean in means.items():
            if close(said / mean, 1.0):
                says = f"rank {rank} reports the mean of the positions of cp {cp} alone"
                ratio = said / oracle.loss
                return Finding(factor="missing sum", says=says, axis="cp", value=ratio)
    return None
