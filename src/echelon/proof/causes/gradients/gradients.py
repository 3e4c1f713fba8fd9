# SPDX-License-Identifier: Apache-2.0
"""What a wrong gradient looks like: compared with sums over ranks, parts of microbatches, shards.

Causes are tried from the most telling to the least. Of those that fit to rounding, the cause that
fits most wrong gradients of the step is reported. Where gradients of activations went to the wrong
microbatch between stages, each weight gradient has the input of one microbatch and the output
gradient of another: the exchange is made on one device, for every pair of microbatches at every
boundary, and compared.

Shape suffixes: B sequences of the global batch, T positions, N = T * B, D hidden, C copies, E
elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import cast

import torch

from echelon.core.axis import SHARD_AXES, Axis
from echelon.core.plan import Plan
from echelon.layout.buckets import shard_degree, slice_index
from echelon.proof.causes.factors import by_reach, common_factor, known_factors, named_factor
from echelon.proof.causes.finding import (
    ProofFinding,
    most_telling,
    no_cause,
    spread,
    with_distinguishing_axis,
)
from echelon.proof.causes.gradients.captured import (
    SAME_NORM,
    WrongGradientOfProgram,
    all_multiplied,
    behind_the_clip,
    excluded_weights,
    gradients_of_program,
)
from echelon.proof.causes.gradients.context import (
    attribute_to_head_copies,
    context_rank_weights,
    gradients_of_keys,
)
from echelon.proof.causes.gradients.experts import gradients_of_experts
from echelon.proof.causes.gradients.microbatch_weights import (
    WrongGradient,
    WrongGradientOfPlan,
    explain_weights,
    fit_microbatch_weights,
    replica_gradients,
)
from echelon.proof.causes.gradients.norm import name_norm
from echelon.proof.causes.gradients.norm_layers import missing_rows
from echelon.proof.causes.passing.places import PassedStep, first_wrong_module
from echelon.proof.causes.places import describe_slice, told_by_slice, wrong_elements
from echelon.proof.claims.captured_checks import is_right
from echelon.proof.claims.checks import Check, activation_gradients, dp_rank_of, relative_error
from echelon.proof.claims.plan_evidence import JudgedEvidence, PlanEvidence
from echelon.proof.evidence.captured import CapturedRun
from echelon.proof.evidence.evidence import CapturedEvidence
from echelon.proof.evidence.fits import (
    EXPLAINED,
    FLOOR,
    fit_basis,
    fit_factor,
    relative_residual,
)
from echelon.proof.evidence.mesh import AxisGroups, group_of, shard_axis
from echelon.proof.evidence.run import GRADIENTS
from echelon.proof.oracle.batches import global_batch
from echelon.proof.oracle.oracle import OracleStep, build_decoder, contributions, whole_loss
from echelon.proof.ranks import ObservedShard


def explain_gradient(evidence: JudgedEvidence, failure: Check) -> ProofFinding:
    """Explain a wrong gradient of any program, and name the ranks that hold it wrong."""
    if isinstance(evidence, CapturedEvidence) and (
        other := behind_the_clip(evidence, failure.step)
    ):
        unclipped, name = other
        check = replace(failure, subject=name, error=_error(unclipped, failure.step, name))
        finding = explain_gradient(unclipped, check)
        says = finding.description
        if any(is_right(unclipped, unclipped.steps[failure.step], n) for n in unclipped.run.shapes):
            says += "; others are right but for the clip, whose norm it is in"
        return replace(finding, description=says, tensor=finding.tensor or name)
    step, name = evidence.steps[failure.step], failure.subject
    right = evidence.wanted_gradient(step.step, name)
    share = evidence.tolerance.allowed(GRADIENTS, step.step, name)
    parts = evidence.run.parts(GRADIENTS, step.step, name)
    if not parts:
        return ProofFinding("missing", "no optimizer took it")
    gradient = _gradient_of(evidence, step.step, name)
    wrong = gradient.wrong
    # A cause that leaves half of the error explains nothing; the error of NaN is NaN.
    causes = (cause for cause in _findings(gradient) if not cause.residual >= failure.error / 2)
    finding = most_telling(causes, partial(_causes_elsewhere, gradient))
    if finding is None:
        says = no_cause(_excluded(gradient))
        odd = wrong_elements(evidence.run.whole(GRADIENTS, step.step, name), right, share)
        finding = told_by_slice(ProofFinding("none", says), describe_slice(odd))
    elif not finding.tensor:
        odd = {other for other in step.gradients if not is_right(evidence, step, other)}
        finding = _by_reach(gradient, finding, odd)
    ranks, holders = tuple(sorted({part.rank for part in wrong})), {part.rank for part in parts}
    told = with_distinguishing_axis(evidence.axes(name), finding, ranks, holders)
    return replace(told, ranks=ranks)


def _error(evidence: CapturedEvidence, step: int, name: str) -> float:
    right = evidence.wanted_gradient(step, name)
    return relative_error(evidence.run.whole(GRADIENTS, step, name), right, FLOOR)


def _by_reach(gradient: WrongGradient, finding: ProofFinding, wrong: set[str]) -> ProofFinding:
    """A factor of several axes by the name of those that reach what is wrong."""
    evidence, step = gradient.evidence, gradient.step
    if " or " not in finding.axis or not _sums_make_it(evidence, step.step, wrong):
        return finding
    return by_reach(evidence, step, finding, wrong, gradient.name)


def _sums_make_it(evidence: JudgedEvidence, step: int, wrong: set[str]) -> bool:
    """True if gradients between blocks are right; the loss of a program may have a factor."""
    if isinstance(evidence, CapturedEvidence):
        passed, some_right = PassedStep(evidence, step), wrong < {*evidence.steps[step].gradients}
        seen = any(module.right for module in passed.backward.values())
        return some_right and seen and first_wrong_module(passed, backward=True) is None
    checks = [check for check in activation_gradients(evidence) if check.step == step]
    return bool(checks) and all(check.error <= check.allowed for check in checks)


def _causes_elsewhere(gradient: WrongGradient) -> Iterator[tuple[str, Iterator[ProofFinding]]]:
    """Yield other wrong gradients of the step, each with the causes that fit it."""
    evidence, step = gradient.evidence, gradient.step
    names = [
        name
        for name in step.gradients
        if name != gradient.name and not is_right(evidence, step, name)
    ]
    for name in spread(names):
        if evidence.run.parts(GRADIENTS, step.step, name):
            yield name, _findings(_gradient_of(evidence, step.step, name))


def _gradient_of(evidence: JudgedEvidence, step: int, name: str) -> WrongGradient:
    """A wrong gradient with its wrong parts, the largest first: a few elements fit any factor."""
    right = evidence.wanted_gradient(step, name)
    allowed = evidence.tolerance.allowed(GRADIENTS, step, name) * float(right.norm()) / 2
    parts = evidence.run.parts(GRADIENTS, step, name)
    wrong = [p for p in parts if not float((p.tensor.double() - p.of(right)).norm()) <= allowed]
    wrong = sorted(wrong or parts, key=lambda part: -part.tensor.numel())
    if isinstance(evidence, CapturedEvidence):
        return WrongGradientOfProgram(
            evidence=evidence, step=evidence.steps[step], name=name, wrong=wrong
        )
    expert = evidence.run.specs[name].expert is not None
    return WrongGradientOfPlan(
        evidence=evidence,
        step=evidence.steps[step],
        name=name,
        wrong=cast("Sequence[ObservedShard]", wrong),
        known=known_factors(evidence.plan, evidence.steps[step], expert=expert),
    )


def _excluded(gradient: WrongGradient) -> Mapping[str, float]:
    """The causes tried on a gradient, each with the share that it leaves unexplained."""
    evidence, step, part = gradient.evidence, gradient.step, gradient.wrong[0]
    right, seen = part.of(gradient.right), part.tensor.double()
    left = {"a factor": fit_factor(seen, right)[1]}
    held = evidence.run.vectors(GRADIENTS, step.step, gradient.name)
    for axis, groups in evidence.sums(gradient.name):
        copies = [held[rank] for rank in group_of(groups, part.rank) if rank in held]
        if len(copies) > 1:
            total = torch.stack(copies).nan_to_num(0.0).sum(0)
            left[f"a sum over {axis}"] = fit_factor(total, gradient.right.reshape(-1))[1]
    if step.step:
        before = part.of(evidence.steps[step.step - 1].gradients[gradient.name].double())
        left["the step before"] = fit_basis(seen, (right, before))[1]
    if isinstance(gradient, WrongGradientOfPlan):
        parts = contributions(gradient.evidence.reference_plan, gradient.step).values()
        own = [part.of(gradients[gradient.name].double()) for gradients in parts]
        left["weights of microbatches and replicas"] = fit_basis(seen, own)[1]
    elif isinstance(gradient, WrongGradientOfProgram):
        left |= excluded_weights(gradient)
    return {name: share for name, share in left.items() if math.isfinite(share)}


def _findings(gradient: WrongGradient) -> Iterator[ProofFinding]:
    values = [part.tensor for part in gradient.wrong]
    if not all(bool(one.isfinite().all()) for one in values):
        yield ProofFinding("not finite", "not finite")
        return
    if float(gradient.right.norm()) and not any(float(one.norm()) for one in values):
        yield ProofFinding("zero", "zero", value=0.0)
    yield from _missing_sum(gradient)
    yield from _wrong_clip(gradient)
    yield from _scalar(gradient)
    if isinstance(gradient, WrongGradientOfPlan):
        for explain in (
            _microbatch_mixture,
            gradients_of_experts,
            context_rank_weights,
            gradients_of_keys,
            slices_of_others,
            _other_shards,
            swapped_messages,
            missing_rows,
        ):
            yield from explain(gradient)
    elif isinstance(gradient, WrongGradientOfProgram):
        yield from gradients_of_program(gradient)


def _missing_sum(gradient: WrongGradient) -> Iterator[ProofFinding]:
    """Find copies whose sum is missing, or that were each clipped by a norm of its own."""
    evidence, step, name = gradient.evidence, gradient.step.step, gradient.name
    first, held = gradient.wrong[0].rank, evidence.run.vectors(GRADIENTS, step, name)
    held, right = {first: held[first], **held}, gradient.right.reshape(-1)
    # A sum may be missing among some ranks of a group alone, and a part may be right by chance.
    of_wrong = {part.rank: held[part.rank] for part in gradient.wrong}
    yield from missing_sums(evidence.sums(name), of_wrong, right, gradient.fits)
    if of_wrong.keys() != held.keys():
        yield from missing_sums(evidence.sums(name), held, right, gradient.fits)
    if gradient.step.clip_norm is None or not evidence.run.reads_clipped:
        return
    for axis, groups in evidence.sums(name):
        copies = [held[rank] for rank in group_of(groups, first) if rank in held]
        common = ~torch.stack(copies).isnan().any(0)
        if not bool(common.any()) or all(one.equal(copies[0]) for one in copies):
            continue
        alone = [fit_factor(one[common], right[common])[1] for one in copies]
        if max(alone) < gradient.fits:
            continue  # each has all of the sum: the clip differs
        weights, residual = fit_basis(right[common], [one[common] for one in copies])
        if residual < gradient.fits and min(weights) > gradient.fits:
            says = f"copies differ along {axis}, and with each clipped by a norm of its own they "
            says += f"add up to the right one: they are not reduced over {axis}"
            yield ProofFinding("missing sum", says, axis, residual=residual)


def missing_sums(
    groups_of_axes: AxisGroups, held: Mapping[int, torch.Tensor], right: torch.Tensor, fits: float
) -> Iterator[ProofFinding]:
    """Find axes along which copies differ and add up to the right tensor, or have it as their mean.

    `held` has the copies that are added up, flat, NaN where a rank has none. Of a tensor that ranks
    have whole, all may use some rows alike and others not: only where copies differ they are
    summed. An explanation leaves less than `fits`, relative.
    """
    for axis, groups in groups_of_axes:
        every = dict.fromkeys(tuple(group_of(groups, rank)) for rank in held)
        findings = (
            _missing_along(axis, [held[rank] for rank in group if rank in held], right, fits)
            for group in every
        )
        if (first := next(filter(None, findings), None)) is not None:
            yield first


def _missing_along(
    axis: str, copies: Sequence[torch.Tensor], right: torch.Tensor, fits: float
) -> ProofFinding | None:
    """The finding that `copies` of one group add up to the right tensor, or have it as mean."""
    if len(copies) < 2:
        return None
    copies_CE = torch.stack(tuple(copies))
    common_E = ~copies_CE.isnan().any(0)
    copies_CE, right_E = copies_CE[:, common_E], right[common_E]
    alike_E = (copies_CE == copies_CE[0]).all(0)
    if not right_E.numel() or bool(alike_E.all()):
        return None
    some = " in some rows" * bool((alike_E & (copies_CE[0] != 0)).any())
    for count, makes in ((1, "add up to"), (len(copies), "have as their mean")):
        total_E = torch.where(alike_E, copies_CE[0], copies_CE.sum(0) / count)
        residual = relative_residual(total_E, right_E)
        if residual < fits:
            says = f"copies differ along {axis}{some} and {makes} the right one: they are not "
            says += f"reduced over {axis}"
            return ProofFinding("missing sum", says, axis, residual=residual)
    return None


def _wrong_clip(gradient: WrongGradient) -> Iterator[ProofFinding]:
    """Find one factor in all gradients of a rank: they are clipped by another norm."""
    evidence, step = gradient.evidence, gradient.step
    clip, run = step.clip_norm, evidence.run
    undone = isinstance(run, CapturedRun) and run.clip_undone
    if clip is None or not run.reads_clipped or undone:
        return
    factors = _factors_of_rank(gradient, gradient.wrong[0].rank)
    if len(factors) < 2:
        return
    bare = [name for name, one in factors.items() if abs(one * step.clip_scale - 1) < gradient.fits]
    clipped = [one for name, one in factors.items() if name not in bare]
    if not clipped:
        yield ProofFinding("1/clip scale", "no gradient is clipped", value=1 / step.clip_scale)
        return
    if max(clipped) - min(clipped) > gradient.fits * max(clipped):
        return
    norm = clip / (clipped[0] * step.clip_scale)
    if math.isclose(norm, step.grad_norm, rel_tol=SAME_NORM):
        yield from all_multiplied(gradient, clipped[0])
        return
    says = f"gradients of the step are clipped by a norm of {norm:.6g}"
    if bare:
        says = f"{len(bare)} of {len(factors)} gradients are not clipped, the others by a norm of "
        yield ProofFinding("partial clip", f"{says}{norm:.6g}", value=norm / step.grad_norm)
        return
    told = name_norm(evidence, step, norm)
    axis, own = _norms_of_wrong_ranks(gradient, norm)
    if told is not None:
        says = f"{says}: {told.description}{own}"
        yield replace(told, description=says, axis=axis or told.axis)
    else:
        says += f" instead of {step.grad_norm:.6g}{own}"
        yield ProofFinding("wrong norm", says, axis, value=norm / step.grad_norm)


def _norms_of_wrong_ranks(gradient: WrongGradient, first: float) -> tuple[str, str]:
    """Return the axes along which ranks clip copies by different norms, and those norms in words.

    Both are empty where all wrong ranks clip by the norm of the `first`.
    """
    step, norms = gradient.step, dict[int, float]()
    for part in gradient.wrong:
        factors = _factors_of_rank(gradient, part.rank)
        if factors and step.clip_norm is not None:
            norms[part.rank] = step.clip_norm / (next(iter(factors.values())) * step.clip_scale)
    differ = [rank for rank, norm in norms.items() if abs(norm - first) > gradient.fits * first]
    if not differ:
        return "", ""
    groups = gradient.evidence.sums(gradient.name)
    axis = next((a for a, g in groups if group_of(g, differ[0]) == group_of(g, min(norms))), "")
    each = ", ".join(f"rank {rank}: {norm:.6g}" for rank, norm in sorted(norms.items()))
    return axis, f"; ranks clip by norms of their own ({each})"


def _factors_of_rank(gradient: WrongGradient, rank: int) -> dict[str, float]:
    """Return the factor of each gradient of a rank; nothing where one is no multiple."""
    evidence, step = gradient.evidence, gradient.step
    factors: dict[str, float] = {}
    for name in step.gradients:
        mine = evidence.run.vector(GRADIENTS, step.step, name, rank)
        held = ~mine.isnan()
        right = evidence.wanted_gradient(step.step, name).reshape(-1)
        if bool(held.any()) and float(right[held].norm()):
            factors[name], residual = fit_factor(mine[held], right[held])
            if residual > gradient.fits or factors[name] <= 0:
                return {}
    return factors


def _scalar(gradient: WrongGradient) -> Iterator[ProofFinding]:
    """Find one factor in all that is wrong, or one for each rank."""
    right = gradient.right
    parts = [part for part in gradient.wrong if float(part.of(right).norm())]
    fits = [fit_factor(part.tensor, part.of(right)) for part in parts]
    if common := common_factor(fits, gradient.fits):
        factor, residual = common
        if math.isclose(factor, 1.0, rel_tol=gradient.fits):
            return
        evidence, name = gradient.evidence, gradient.name
        named = named_factor(evidence, gradient.step, factor, residual, parameter=name)
        if isinstance(evidence, PlanEvidence):
            named = attribute_to_head_copies(evidence.plan, name, named)
        yield named
    elif fits and all(residual < gradient.fits for _, residual in fits):
        of_ranks = zip(parts, fits, strict=True)
        each = ", ".join(f"rank {part.rank}: {factor:.6g}" for part, (factor, _) in of_ranks)
        says = f"each rank has it times a factor of its own ({each})"
        furthest = max((factor for factor, _ in fits), key=lambda factor: abs(factor - 1.0))
        yield ProofFinding("factors of ranks", says, value=furthest)


def _microbatch_mixture(gradient: WrongGradientOfPlan) -> Iterator[ProofFinding]:
    """Find the weights of the microbatches of all replicas, and of the step before."""
    evidence, step = gradient.evidence, gradient.step.step
    parts = contributions(evidence.reference_plan, gradient.step)
    for piece in gradient.wrong[:4]:
        before = None
        if step:
            before = evidence.steps[step - 1].gradients[gradient.name][piece.region]
        own = {slot: part[gradient.name][piece.region] for slot, part in parts.items()}
        mixture = fit_microbatch_weights(piece.tensor, own, before)
        if mixture is None or mixture.right:
            continue
        served = evidence.plan.mesh.is_server(piece.rank)
        dp_rank = None if served else dp_rank_of(evidence.plan, piece.rank)
        finding = explain_weights(mixture, gradient, dp_rank)
        if finding is None:
            told = ", ".join(f"({r}, {m}): {w:.4g}" for (r, m), w in mixture.weights.items())
            says = f"a sum of microbatches (dp rank, microbatch) with other weights than 1: {told}"
            residual = mixture.residual
            finding = ProofFinding("microbatches weighted", says, "dp", residual=residual)
        yield finding
        return


def _other_shards(gradient: WrongGradientOfPlan) -> Iterator[ProofFinding]:
    """Find a shard that is made of other tensor ranks' shards: a wrong group, or a wrong slice."""
    plan, spec = gradient.evidence.plan, gradient.spec
    if spec.split_dim is None or plan.mesh.tp == 1 or spec.expert is not None:
        return
    replicas = replica_gradients(gradient, gradient.name)
    dim, tp = spec.split_dim, plan.mesh.tp
    local = spec.local_shape(tp)[dim]
    for piece in gradient.wrong[:4]:
        own = piece.offset[dim] // local
        cut = [
            _pad(replica, dim, local * tp)[_moved(piece, dim, (slot - own) * local)]
            for replica in replicas
            for slot in range(tp)
        ]
        weights, residual = fit_basis(piece.tensor, cut)
        if residual < EXPLAINED:
            slots = [(dp_rank, slot) for dp_rank in range(plan.mesh.dp) for slot in range(tp)]
            mixed = dict(zip(slots, weights, strict=True))
            yield _name_mixture(mixed, own, plan.mesh.dp, residual)
            return


def _moved(piece: ObservedShard, dim: int, distance: int) -> tuple[slice, ...]:
    """Return the region of a piece, moved along a dim."""
    region = list(piece.region)
    region[dim] = slice(region[dim].start + distance, region[dim].stop + distance)
    return tuple(region)


def _pad(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Return a vocabulary dim padded with zeros, as ranks hold it."""
    shape = list(tensor.shape)
    shape[dim] = size - tensor.shape[dim]
    return torch.cat((tensor, tensor.new_zeros(shape)), dim=dim)


def _name_mixture(
    mixed: dict[tuple[int, int], float], own: int, dp: int, residual: float
) -> ProofFinding:
    used = sorted({slot for (_, slot), weight in mixed.items() if abs(weight) > EXPLAINED})
    if own not in used:
        says = f"the shard of tp {own} holds that of tp {used}: shards are permuted"
        return ProofFinding("shards permuted", says, "tp", residual=residual)
    lost = [r for r in range(dp) if abs(mixed[r, own]) <= EXPLAINED]
    says = f"the shard of tp {own} was summed with those of tp {used}: the wrong group"
    if lost:
        says += f", while the parts of dp {lost} are missing"
    return ProofFinding("wrong group", says, "tp", residual=residual)


_MOST_MICROBATCHES = 8
"""Pairs are tried one by one; a proof that was shrunk has few."""


def swapped_messages(gradient: WrongGradientOfPlan) -> Iterator[ProofFinding]:
    """Find two microbatches whose gradients changed places where they entered a stage."""
    plan, reference = gradient.evidence.plan, gradient.evidence.reference_plan
    piece = gradient.wrong[0]
    if plan.mesh.pp == 1 or plan.num_microbatches > _MOST_MICROBATCHES:
        return
    for stage, layer in _ends(plan):
        exchanged = _exchanged(reference, gradient.step, gradient.name, layer)
        for (one, other), found in exchanged:
            residual = relative_residual(piece.tensor.double(), found[piece.region])
            if residual < EXPLAINED:
                says = (
                    f"the gradients that stage {stage + 1} gives to stage {stage} changed places: "
                    f"microbatch {one} got that of {other}, and {other} that of {one}"
                )
                yield ProofFinding("order", says, "pp", residual=residual)
                return


def _ends(plan: Plan) -> Iterator[tuple[int, int]]:
    """Yield each stage that another one follows, with the last block that has run by its end."""
    last = None
    for stage, blocks in enumerate(plan.layout.pipeline.stages[:-1]):
        last = blocks[-1] if blocks else last
        if last is not None:
            yield stage, last


def _exchanged(
    plan: Plan, oracle: OracleStep, name: str, layer: int
) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
    """Yield the gradient of `name` for each pair that changes places after block `layer`."""
    model = build_decoder(plan, oracle.before, routing=oracle.routing, rounding=oracle.rounding)
    kept: list[torch.Tensor] = []
    model.layers[str(layer)].register_forward_hook(lambda *found: kept.append(found[-1]))
    batch = global_batch(plan, oracle.step)
    loss = whole_loss(plan, model, oracle)
    (h_ND,) = kept
    parameter = model.get_parameter(name)
    (dh_ND,) = torch.autograd.grad(loss, h_ND, retain_graph=True)

    def from_above(dh: torch.Tensor) -> torch.Tensor | None:
        (found,) = torch.autograd.grad(h_ND, parameter, dh, retain_graph=True, allow_unused=True)
        return found

    right = from_above(dh_ND)
    if right is None:  # it is above the boundary
        return
    dh_TBD = dh_ND.view(-1, len(batch.sample_ids), dh_ND.shape[1])
    for one, other in combinations(range(plan.num_microbatches), 2):
        wrong = from_above(_swapped(plan, dh_TBD, one, other).reshape_as(dh_ND))
        assert wrong is not None
        yield (one, other), oracle.gradients[name] + (wrong - right)


def _swapped(plan: Plan, dh_TBD: torch.Tensor, one: int, other: int) -> torch.Tensor:
    """Return dh with the rows of two microbatches exchanged, on every replica."""
    rows_B = torch.arange(dh_TBD.shape[1]).view(plan.mesh.dp, plan.num_microbatches, -1)
    rows_B[:, [one, other]] = rows_B[:, [other, one]]
    return dh_TBD[:, rows_B.flatten()]


_LEAST = 4
"""Elements in a row that are not found elsewhere by chance."""


def slices_of_others(gradient: WrongGradientOfPlan) -> Iterator[ProofFinding]:
    """Find the right gradient of another slice in a wrong piece."""
    plan, expert = gradient.evidence.plan, gradient.spec.expert is not None
    if shard_degree(plan, expert=expert) == 1:
        return
    for piece in gradient.wrong[:4]:
        owners = sorted(_owners(gradient, piece) - {piece.rank})
        if not owners:
            continue
        if expert:
            place, other = (slice_index(plan, r, expert=True) for r in (piece.rank, owners[0]))
            says = f"edp_shard {place} holds the slice of edp_shard {other}: slices are permuted"
            yield ProofFinding("slices permuted", says, "edp_shard")
            return
        group = [r for r in owners if r in plan.mesh.group(piece.rank, *SHARD_AXES)]
        other = group[0] if group else owners[0]
        here, there = plan.mesh.coordinates(piece.rank), plan.mesh.coordinates(other)
        moved = [axis.value for axis in SHARD_AXES if here[axis] != there[axis]]
        cut = [axis for axis in SHARD_AXES if plan.mesh.degree(axis) > 1]
        name, whose = (" ".join(f"{a.value} {at[a]}" for a in cut) for at in (here, there))
        says = f"{name} holds the slice of {whose}: slices are permuted"
        axis = " and ".join(moved) if plan.mesh.degree(Axis.CP) > 1 else shard_axis(plan)
        yield ProofFinding("slices permuted", says, axis)
        return


def _owners(gradient: WrongGradientOfPlan, piece: ObservedShard) -> set[int]:
    """Return the ranks that should hold what a piece begins with, by what they say they hold."""
    start = piece.tensor.reshape(-1)[: 2 * _LEAST].double()
    if start.numel() < _LEAST or not float(start.norm()):
        return set()
    observed, oracle = gradient.evidence.run, gradient.step
    for name, right in oracle.gradients.items():
        flat = right.double().reshape(-1)
        if flat.numel() < start.numel():
            continue
        near = (flat.unfold(0, start.numel(), 1) - start).norm(dim=1) < EXPLAINED * start.norm()
        for at in near.nonzero()[:1, 0].tolist():
            whose = torch.zeros(flat.numel(), dtype=torch.bool)
            whose[at] = True
            first = whose.view(right.shape)
            others = observed.parts("gradients", oracle.step, name)
            return {other.rank for other in others if bool(first[other.region].any())}
    return set()
