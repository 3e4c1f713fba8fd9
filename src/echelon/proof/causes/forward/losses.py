# SPDX-License-Identifier: Apache-2.0
"""What wrong losses look like: another microbatch's, a factor, a known mistake; a wrong scale.

What is gathered before it is used can be gathered too early, or kept too long: one device runs the
same forward with the old values of each unit in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations, product
from statistics import fmean

import torch

from echelon.core.axis import SHARD_AXES
from echelon.core.plan import Plan
from echelon.layout.buckets import plan_buckets, shard_degree, unit_of
from echelon.layout.slots import slot_ranges
from echelon.layout.stage import held_parameters, rank_part
from echelon.proof.causes.factors import (
    known_factors,
    mean_of_means,
    named_factor,
    tokens_of_replicas,
)
from echelon.proof.causes.finding import (
    ROUNDING,
    ProofFinding,
    most_telling,
    with_distinguishing_axis,
)
from echelon.proof.causes.forward.context import context_variants, row_variants
from echelon.proof.causes.forward.experts import expert_variants
from echelon.proof.causes.forward.variants import Values, Variant, dropout_variants, variants
from echelon.proof.causes.token_ranks import means_by_context_rank
from echelon.proof.claims.captured_checks import gradients_are_right
from echelon.proof.claims.checks import Check, copies_at, whole_activation
from echelon.proof.claims.plan_evidence import JudgedEvidence, PlanEvidence
from echelon.proof.evidence.fits import EXPLAINED, furthest_value, nearly_equal, relative_residual
from echelon.proof.evidence.mesh import index_in_group, shard_axis
from echelon.proof.oracle.batches import global_batch
from echelon.proof.oracle.oracle import (
    MicrobatchKey,
    OracleStep,
    build_decoder,
    hearing,
    sums_by_microbatch,
    token_losses,
)
from echelon.proof.subject import ProofBatch

Losses = Mapping[MicrobatchKey, float]

_SAME = 1e-7  # relative difference


def explain_microbatch_losses(evidence: PlanEvidence, failure: Check) -> ProofFinding:
    """Return the mistake behind wrong losses of microbatches."""
    oracle = evidence.steps[failure.step]
    reported = evidence.run.microbatch_losses(failure.step)
    for slot, values in reported.items():
        if any(abs(value - values[0][0]) > _SAME * abs(value) for value, _ in values):
            says = f"tensor ranks disagree on the loss of dp {slot[0]} microbatch {slot[1]}"
            return ProofFinding("replicas differ", says, "tp")
    if oracle.microbatch_losses.keys() - reported.keys():
        return ProofFinding("missing", "some microbatches have no loss", "pp")
    observed = {slot: reported[slot][0][0] for slot in oracle.microbatch_losses}
    right = {slot: total for slot, (total, _) in oracle.microbatch_losses.items()}
    ratios = [observed[slot] / right[slot] for slot in right]
    if all(nearly_equal(ratio, 1.0) for ratio in ratios):
        return _miscounted(oracle, reported) or ProofFinding("none", ROUNDING)
    if all(nearly_equal(ratio, ratios[0]) for ratio in ratios):
        return named_factor(evidence, oracle, ratios[0])
    says = "another forward pass: no cause fits; excluded are a factor, another order, labels of "
    says += "another microbatch, and each known mistake of a forward pass"
    return (
        _moved(right, observed)
        or _mixed_up(evidence, oracle, observed)
        or _known_mistake(evidence, oracle, observed)
        or ProofFinding("none", says)
    )


def _miscounted(
    oracle: OracleStep, reported: Mapping[MicrobatchKey, Sequence[tuple[float, int]]]
) -> ProofFinding | None:
    for slot, (_, right) in oracle.microbatch_losses.items():
        for _, count in reported[slot]:
            if count != right:
                says = f"{count} valid tokens instead of {right} beside the right loss"
                return ProofFinding("token count", says, value=count / right)
    return None


def _moved(right: Losses, observed: Losses) -> ProofFinding | None:
    """Find losses that are right, but of other microbatches or replicas."""
    source: dict[MicrobatchKey, MicrobatchKey] = {}
    for slot, value in observed.items():
        near = [other for other, total in right.items() if abs(total - value) <= _SAME * abs(total)]
        if not near:
            return None
        source[slot] = near[0]
    moved = {slot: other for slot, other in source.items() if slot != other}
    for slot, other in moved.items():
        if slot[0] != other[0]:
            says = f"dp {slot[0]} worked on the samples of dp {other[0]}"
            return ProofFinding("same data", says, "dp")
    told = ", ".join(f"{slot[1]} is {other[1]}" for slot, other in moved.items())
    says = f"microbatches in another order: {told}"
    return ProofFinding("order", says, "microbatches") if moved else None


def _mixed_up(evidence: PlanEvidence, oracle: OracleStep, observed: Losses) -> ProofFinding | None:
    """Find the activations of one microbatch beside the labels of another."""
    plan = evidence.reference_plan
    count = plan.num_microbatches
    batch = global_batch(plan, oracle.step)
    model = build_decoder(plan, oracle.before, routing=oracle.routing, rounding=oracle.rounding)
    with torch.no_grad():
        sums = [
            sums_by_microbatch(plan, one, token_losses(plan, model, one, oracle.step))
            for shift in range(count)
            for one in [_with_labels(plan, batch, shift)]
        ]
    for dp_rank in range(plan.mesh.dp):
        pairs: list[tuple[int, int]] = []
        for microbatch in range(count):
            wanted = observed[dp_rank, microbatch]
            near = [
                (inputs, (inputs + shift) % count)
                for shift, inputs in product(range(count), repeat=2)
                if abs(float(sums[shift][dp_rank, inputs][0]) - wanted) <= _SAME * abs(wanted)
            ]
            if not near:
                return None
            pairs.append(near[0])
        told = ", ".join(f"{i} with the labels of {m}" for i, m in pairs if i != m)
        if told:
            stale = len({inputs for inputs, _ in pairs}) < len(pairs)
            why = "a buffer was overwritten in flight" if stale else "taken in another order"
            says = f"activations of microbatch {told}: {why}"
            return ProofFinding("stale" if stale else "order", says, "pp")
    return None


def _with_labels(plan: Plan, batch: ProofBatch, shift: int) -> ProofBatch:
    """Return the batch with the labels of microbatch m + shift beside the inputs of m."""
    labels_BT = batch.labels_BT.view(
        plan.mesh.dp, plan.num_microbatches, plan.layout.microbatch_sequences, -1
    )
    rolled = labels_BT.roll(-shift, dims=1).reshape(batch.labels_BT.shape)
    return replace(batch, labels_BT=rolled)


def _known_mistake(
    evidence: PlanEvidence, oracle: OracleStep, observed: Losses
) -> ProofFinding | None:
    """Find a mistake that gives the losses of all microbatches, or of some beside right ones."""
    plan = evidence.reference_plan
    batch = global_batch(plan, oracle.step)
    slots, seen = list(observed), _activations(evidence, oracle)
    share_B = len(batch.sample_ids) // len(slots)
    wanted = torch.tensor([observed[slot] for slot in slots], dtype=torch.float64)
    right = torch.tensor([oracle.microbatch_losses[slot][0] for slot in slots]).double()
    fine = _same(right, wanted)
    best: tuple[float, ProofFinding] | None = None
    for variant in chain(
        outdated_parameter_variants(evidence, oracle),
        permuted_slice_variants(evidence.plan, oracle),
        row_variants(plan),
        context_variants(plan),
        dropout_variants(plan),
        expert_variants(plan, oracle),
        variants(plan, oracle, known_factors(plan, oracle)),
    ):
        model = variant.build(plan, oracle)
        with torch.no_grad(), hearing(model) as heard:
            losses_BT = token_losses(plan, model, batch, oracle.step)
        sums = sums_by_microbatch(plan, batch, losses_BT)
        found = torch.stack([sums[slot][0] for slot in slots])
        same = _same(found, wanted)
        if bool((same | fine).all()):
            residual = float(((found - wanted) / wanted).abs()[same].max())
            limited = _limited_to_replicas(replace(variant.finding, residual=residual), slots, fine)
            wrong_B = ~fine.repeat_interleave(share_B)
            agrees = _share_alike(seen, heard.forward, oracle, wrong_B)
            if agrees == 1:
                return limited
            best = (agrees, limited) if best is None or agrees > best[0] else best
    return best and best[1]


def _activations(evidence: PlanEvidence, oracle: OracleStep) -> Mapping[str, torch.Tensor]:
    """What the ranks have together at each boundary that they tell, in their forward passes."""
    copies = copies_at(evidence.plan, evidence.run, oracle.step)
    forward = {
        name: [copy for copy in every if not copy.recomputed] for name, every in copies.items()
    }
    return {
        name: whole_activation(forward[name], right)
        for name, right in oracle.activations.items()
        if forward.get(name)
    }


def _share_alike(
    seen: Mapping[str, torch.Tensor],
    made: Mapping[str, torch.Tensor],
    oracle: OracleStep,
    wrong_B: torch.Tensor,
) -> float:
    """Share of the boundaries at which the sequences that a mistake reaches are as it makes them.

    Others are as on one device.
    """
    alike: list[bool] = []
    for name, seen_BTW in seen.items():
        if name in made:
            right_BTW = oracle.activations[name].double()
            told_BTW = torch.where(wrong_B[:, None, None], made[name].double(), right_BTW)
            known = seen_BTW.isfinite()
            alike.append(relative_residual(seen_BTW[known], told_BTW[known]) < EXPLAINED)
    return fmean(alike) if alike else 1.0


def _same(tried: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (tried - wanted).abs() < _SAME * wanted.abs()


def _limited_to_replicas(
    finding: ProofFinding, slots: Sequence[MicrobatchKey], fine: torch.Tensor
) -> ProofFinding:
    """Add the replicas that a mistake is limited to."""
    wrong = {slot[0] for slot, right in zip(slots, fine, strict=True) if not right}
    others = {slot[0] for slot in slots} - wrong
    if not others:
        return finding
    says = f"only on dp {sorted(wrong)}: {finding.description}"
    return replace(finding, description=says, axis=finding.axis or "dp")


def explain_loss(evidence: JudgedEvidence, failure: Check) -> ProofFinding:
    """Explain a wrong loss of the whole batch; in a plan its microbatches are right.

    Ranks of a program may each tell the loss of their own rows.
    """
    later = [other.step for other in evidence.steps[failure.step + 1 :]]
    finding = most_telling(
        _causes(evidence, failure.step),
        lambda: (
            (f"loss of step {other}", _causes(evidence, other))
            for other in later
            if gradients_are_right(evidence, other)
        ),
    )
    if finding is None:
        return ProofFinding("none", ROUNDING)
    finding = replace(finding, tensor="loss")
    if isinstance(evidence, PlanEvidence):
        return finding
    if finding.factor != "number":
        return replace(finding, description=f"{failure.detail}: {finding.description}")
    reports = evidence.run.reports(failure.step)
    told = [report.loss for report in reports if report.loss is not None]
    spread = f"; ranks tell {min(told):.6g} to {max(told):.6g}" if len(set(told)) > 1 else ""
    says = f"{failure.detail}{spread}: another forward pass, other rows, or another mean of them"
    return ProofFinding("none", says)


def _causes(evidence: JudgedEvidence, number: int) -> Iterator[ProofFinding]:
    """Yield each cause that fits the loss of a step as ranks report it."""
    step = evidence.steps[number]
    reports = evidence.run.reports(number)
    reported = [report.loss for report in reports if report.loss is not None]
    if isinstance(evidence, PlanEvidence):
        value = furthest_value(reported, step.loss)
    else:
        value = evidence.run.loss(number) or 0.0
    if nearly_equal(value / step.loss, 1.0):
        return
    if isinstance(evidence, PlanEvidence):
        oracle = evidence.steps[number]
        yield from mean_of_means(reported[0], step.loss, _means(evidence, oracle), EXPLAINED)
        yield from _mean_of_one(evidence, oracle, reported)
    else:
        sums = [(total, tokens) for tokens, total in step.part_losses]
        parts = [("the parts of the batch", "", sums)]
        yield from mean_of_means(value, step.loss, parts, evidence.explained)
    yield named_factor(evidence, step, value / step.loss)


def _sums_of_replicas(evidence: PlanEvidence, oracle: OracleStep) -> list[tuple[float, int]]:
    losses, tokens = oracle.microbatch_losses, tokens_of_replicas(oracle)
    return [
        (sum(total for slot, (total, _) in losses.items() if slot[0] == dp), tokens[dp])
        for dp in range(evidence.plan.mesh.dp)
    ]


def _means(
    evidence: PlanEvidence, oracle: OracleStep
) -> Iterator[tuple[str, str, list[tuple[float, int]]]]:
    """Yield whose means a plan may take the mean of, the axis, and the sums behind each."""
    yield "all microbatches", "dp", list(oracle.microbatch_losses.values())
    yield "the replicas", "dp", _sums_of_replicas(evidence, oracle)
    if evidence.plan.mesh.cp > 1:
        by_rank = means_by_context_rank(evidence.reference_plan, oracle)
        yield "the context ranks", "cp", [(mean, 1) for mean in by_rank.values()]


def _mean_of_one(
    evidence: PlanEvidence, oracle: OracleStep, told: Sequence[float]
) -> Iterator[ProofFinding]:
    """Find a rank that reports the mean of one replica, or of one context rank."""
    mesh = evidence.plan.mesh
    replicas = enumerate(_sums_of_replicas(evidence, oracle) if mesh.dp > 1 else ())
    alone = [("dp", f"dp {dp}", total / count) for dp, (total, count) in replicas]
    if mesh.cp > 1:
        by_rank = means_by_context_rank(evidence.reference_plan, oracle)
        alone += [("cp", f"the positions of cp {cp}", one) for (_, cp), one in by_rank.items()]
    for (rank, value), (axis, whose, mean) in product(enumerate(told), alone):
        if nearly_equal(value / mean, 1.0):
            says = f"rank {rank} reports the mean of {whose} alone"
            yield ProofFinding("missing sum", says, axis, value=value / oracle.loss)


def explain_scale(evidence: PlanEvidence, failure: Check) -> ProofFinding:
    """Return who missed an overflow, or skipped a step without one, or scaled otherwise."""
    oracle = evidence.steps[failure.step]
    reports = evidence.run.reports(failure.step)
    wrong = [r for r, one in enumerate(reports) if one.skipped not in (None, oracle.skipped)]
    if not wrong:
        scales = [one.loss_scale for one in reports if one.loss_scale is not None]
        value = furthest_value(scales, oracle.loss_scale)
        wrong = [rank for rank, one in enumerate(reports) if one.loss_scale == value]
        finding = named_factor(evidence, oracle, value / oracle.loss_scale)
    elif not oracle.skipped:
        finding = ProofFinding("skipped", "skips a step in which nothing overflowed")
    else:
        says = "updates in a step whose gradients overflowed"
        finding = ProofFinding("overflow missed", says)
        if len(wrong) < len(reports):
            finding = ProofFinding("overflow not agreed", f"{says}, which other ranks skip")
    finding = replace(finding, ranks=tuple(wrong))
    return with_distinguishing_axis(evidence.axes(), finding, wrong, range(len(reports)))


def outdated_parameter_variants(evidence: PlanEvidence, oracle: OracleStep) -> Iterator[Variant]:
    """Return the forward passes of `oracle` in which some values are those of the step before."""
    plan = evidence.reference_plan
    if not oracle.step or evidence.steps[oracle.step - 1].skipped:
        return
    old, new = evidence.steps[oracle.step - 1].before, oracle.before
    units: dict[str, list[str]] = {}
    for name in new:
        units.setdefault(unit_of(name), []).append(name)
    scopes = {**units, "the whole model": list(new)}
    num_slices = plan.mesh.degree(*SHARD_AXES) if plan.layout.zero.stage else 1
    axis = shard_axis(plan) if num_slices > 1 else ""

    def variant(
        what: str, names: Sequence[str], axis: str, was: str, where: Values | None = None
    ) -> Variant:
        says = f"the forward pass uses {what} as {was} before the last update"
        finding = ProofFinding("stale", says, axis, tensor=names[0])
        return Variant(finding, values=with_old_values(new, old, names, where))

    for unit, names in scopes.items():
        yield variant(unit, names, axis, "it was")
    among = "edp_shard" if shard_degree(plan, expert=True) > 1 else ""
    for unit, names in units.items():
        experts = [name for name in names if evidence.run.specs[name].expert is not None]
        if experts:
            yield variant(f"the experts of {unit}", experts, among, "they were")
    for index in range(num_slices if num_slices > 1 else 0):
        slices = _slices(evidence, oracle.step, index)
        for unit, names in scopes.items():
            what = f"the slice that {axis} {index} holds of {unit}"
            yield variant(what, names, axis, "it was", slices)


def permuted_slice_variants(plan: Plan, oracle: OracleStep) -> Iterator[Variant]:
    """Return the forward passes of `oracle` whose ranks gather slices in another order.

    This happens to every sliced bucket without experts, or to every bucket of codes. The slices are
    rotated, or two slices are exchanged.
    """
    degree = shard_degree(plan)
    if degree == 1 or plan.mesh.tp > 1:
        return
    turned = [[(i - by) % degree for i in range(degree)] for by in range(1, degree)]
    swapped = [
        [b if i == a else a if i == b else i for i in range(degree)]
        for a, b in combinations(range(degree if degree > 2 else 0), 2)
    ]
    coded = (False, True) if plan.layout.zero.gather != "parameters" else (False,)
    for codes, order in product(coded, (*turned, *swapped)):
        values = dict(oracle.before)
        for stage in range(plan.mesh.pp):
            part = rank_part(plan, stage)
            specs = {spec.name: spec for spec in held_parameters(plan, part)}
            for bucket in plan_buckets(plan, part):
                travels = not codes or bucket.int8_blocks or bucket.fp8_squares
                if not bucket.sliced or bucket.expert or not travels:
                    continue
                flat = torch.zeros(bucket.num_elements, dtype=torch.float64)
                slots = slot_ranges(plan, bucket, specs)
                for slot in slots:
                    flat[slot.start : slot.stop] = oracle.before[slot.spec.name].flatten()
                moved = flat.view(degree, -1)[order].flatten()
                for slot in slots:
                    name = slot.spec.name
                    values[name] = moved[slot.start : slot.stop].view_as(oracle.before[name])
        first, other = next((i, j) for i, j in enumerate(order) if i != j)
        axis = shard_axis(plan)
        says = f"the slice of {axis} {other} is gathered in the place of {axis} {first}: "
        says += "slices are permuted"
        yield Variant(ProofFinding("slices permuted", says, axis), values=values)


def with_old_values(
    new: Values, old: Values, names: Sequence[str], where: Values | None = None
) -> dict[str, torch.Tensor]:
    """Return the new values, but the old ones of `names` (and `where`, true in places)."""
    changed = {
        name: old[name] if where is None else torch.where(where[name], old[name], new[name])
        for name in names
    }
    return {**new, **changed}


def _slices(evidence: PlanEvidence, step: int, index: int) -> dict[str, torch.Tensor]:
    """Return which elements the ranks at place `index` of the slices update."""
    observed = evidence.run
    where = {n: torch.zeros(spec.shape, dtype=torch.bool) for n, spec in observed.specs.items()}
    for name, mask in where.items():
        for piece in observed.parts("gradients", step, name):
            if index_in_group(evidence.plan, piece.rank, SHARD_AXES) == index:
                mask[piece.region] = True
    return where
