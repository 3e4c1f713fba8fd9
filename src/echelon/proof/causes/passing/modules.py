# SPDX-License-Identifier: Apache-2.0
"""Between which modules a pass of a program goes wrong, forward or backward, and how.

It says where a mistake begins that claims have found; it is no claim. What lies at no known place
is not compared, and a module is not blamed where one that comes after it is right. A weight may
have no gradient though backward did come to its module: the model has another tensor in its place,
or the gradient is lost on the way, of all microbatches or of some.

Shape suffixes: N tokens, V classes, I inputs, O outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import torch

from echelon.proof.causes.factors import common_factor, named_factor
from echelon.proof.causes.finding import ProofFinding, with_distinguishing_axis
from echelon.proof.causes.passing.forward import wrong_forward
from echelon.proof.causes.passing.places import (
    PassedPlace,
    PassedStep,
    WrongModule,
    cut_axes,
    first_wrong_module,
    sliced,
)
from echelon.proof.evidence.captured import STAND_INS
from echelon.proof.evidence.evidence import CapturedEvidence
from echelon.proof.evidence.fits import fit_basis, fit_factor, relative_residual
from echelon.proof.evidence.run import GRADIENTS, INITIAL, PARAMETERS


def explain_passing(
    evidence: CapturedEvidence, step: int, *, backward: bool
) -> ProofFinding | None:
    """Return the first module whose output, or gradient, is wrong; None where none is seen."""
    wrong = first_wrong_module(PassedStep(evidence, step), backward=backward)
    if wrong is None:
        return None
    before = "" if wrong.before is None else f"; that of {wrong.before.name}, before it, is right"
    finding = next(_findings(wrong), None)
    finding = finding or ProofFinding("none", f"{wrong.where} is the first wrong one{before}")
    ranks = {one.rank for one in wrong.module.wrong}
    held = ranks | {one.rank for one in wrong.module.right}
    finding = with_distinguishing_axis(evidence.axes(), finding, ranks, held)
    return replace(finding, tensor=wrong.name, ranks=tuple(sorted(ranks)))


def _findings(wrong: WrongModule) -> Iterator[ProofFinding]:
    places = wrong.module.wrong
    if not all(bool(one.values.isfinite().all()) for one in places):
        yield ProofFinding("not finite", f"{wrong.where} is not finite")
        return
    if not any(float(one.values.norm()) for one in places):
        yield ProofFinding("zero", f"{wrong.where} is zero", value=0.0)
        return
    if wrong.module.partial:
        axis = " and ".join(wrong.module.partial)
        says = f"{wrong.where} differs along {axis} and adds up to the right one: it is not summed "
        yield ProofFinding("missing sum", says + f"over {axis}", axis)
    if wrong.backward:
        yield from _missing_columns(wrong)
    if not wrong.backward:
        yield from wrong_forward(wrong)
    yield from _scalar(wrong)
    if wrong.backward:
        yield from _without_softmax_term(wrong)
    yield from _elsewhere(wrong)


def _missing_columns(wrong: WrongModule) -> Iterator[ProofFinding]:
    """Find a gradient that lacks what other ranks' columns of the layers behind send back."""
    passed, evidence = wrong.passed, wrong.evidence
    whole = passed.whole(wrong.name, gradient=True)
    layers = [
        layer
        for layer in passed.sources.get(wrong.name, [])
        if len(evidence.run.shapes.get(f"{layer}.weight", ())) == 2
        and evidence.run.split_axes(f"{layer}.weight")[0]
    ]
    for chosen in [[layer] for layer in layers] + [layers] * (len(layers) > 1):
        lacks = {
            one.rank: [_of_other_columns(passed, layer, one.rank) for layer in chosen]
            for one in wrong.module.wrong
        }
        if whole is None or any(part is None for parts in lacks.values() for part in parts):
            continue
        residuals: list[float] = []
        for one in wrong.module.wrong:
            lacking = torch.stack([part for part in lacks[one.rank] if part is not None]).sum(0)
            residuals.append(fit_factor(one.values, sliced(whole - lacking, one.cut))[1])
        if max(residuals) <= passed.fits and any(
            float(part.norm()) for parts in lacks.values() for part in parts if part is not None
        ):
            axis = " and ".join(evidence.run.split_axes(f"{chosen[0]}.weight")[0])
            says = f"{wrong.where} is what this rank's columns of {' and '.join(chosen)} send back:"
            says += f" it is not summed over {axis}"
            yield ProofFinding("missing sum", says, axis, residual=max(residuals))


def _of_other_columns(passed: PassedStep, layer: str, rank: int) -> torch.Tensor | None:
    """Return what the rows of a weight that a rank does not hold add to its input's gradient."""
    evidence, name = passed.evidence, f"{layer}.weight"
    gradient = passed.whole(layer, gradient=True)
    weight = evidence.steps[passed.step].before[name].double()
    if gradient is None or gradient.shape[-1] != weight.shape[0]:
        return None
    others = torch.ones(weight.shape, dtype=torch.bool)
    for piece in evidence.run.parts(PARAMETERS, INITIAL, name):
        if piece.rank == rank:
            others.view(-1)[piece.index] = False
    if not bool((others.all(1) | ~others.any(1)).all()):
        return None
    return gradient[..., others[:, 0]] @ weight[others[:, 0]]


def _scalar(wrong: WrongModule) -> Iterator[ProofFinding]:
    if not wrong.backward:
        return
    fits = [(one.factor / wrong.usual, one.residual) for one in wrong.module.wrong]
    if common := common_factor(fits, wrong.passed.fits):
        factor, residual = common
        step = wrong.evidence.steps[wrong.passed.step]
        named = named_factor(wrong.evidence, step, factor, residual)
        yield replace(named, description=f"{wrong.where} is the right one, times {factor:.6g}")


def _without_softmax_term(wrong: WrongModule) -> Iterator[ProofFinding]:
    """Find a gradient of logits without what goes back through the softmax's denominator.

    For each token that is a multiple of the probabilities: a sum of gradients over all classes.
    """
    logits = wrong.passed.whole(wrong.name)
    if logits is None:
        return
    probabilities = logits.softmax(-1)
    residuals: list[float] = []
    for one in wrong.module.wrong:
        term_NV = sliced(probabilities, one.cut).flatten(0, -2)
        seen_NV, right_NV = one.values.flatten(0, -2), one.right.flatten(0, -2)
        # Rows of a single class are multiples of anything.
        if term_NV.shape[-1] < 3:
            return
        seen_NV, right_NV = _without(seen_NV, term_NV), _without(right_NV, term_NV)
        residuals.append(fit_factor(seen_NV, right_NV)[1])
    if max(residuals) <= wrong.passed.fits:
        axis = cut_axes(wrong.evidence, wrong.module.wrong, inner=True)
        over = f", a sum over the classes, which are split over {axis}" if axis else ""
        says = f"{wrong.where} is off by a multiple of the softmax for each token: what goes back "
        says += f"through its denominator{over}, is not in it"
        yield ProofFinding("missing softmax term", says, axis, residual=max(residuals))


def _without(values_NV: torch.Tensor, term_NV: torch.Tensor) -> torch.Tensor:
    """Return rows without their part along the rows of a term."""
    share = (values_NV * term_NV).sum(-1, keepdim=True) / term_NV.square().sum(-1, keepdim=True)
    return values_NV - share * term_NV


def _elsewhere(wrong: WrongModule) -> Iterator[ProofFinding]:
    """Find the slice of another rank, or the right values in another order."""
    places, fits = wrong.module.wrong, wrong.passed.fits
    every = [*wrong.module.right, *places]
    axis = cut_axes(wrong.evidence, every, inner=True) or cut_axes(
        wrong.evidence, every, inner=False
    )
    others = [
        next((o for o in every if o.cut != one.cut and _is(one, o.right, fits)), None)
        for one in places
    ]
    moved = [(one, o) for one, o in zip(places, others, strict=True) if o is not None]
    if len(moved) == len(places):
        one, other = moved[0]
        if wrong.backward and all(a.rank == b.rank for a, b in moved) and len(moved) > 1:
            says = f"{wrong.where} of microbatch {one.call} is that of microbatch {other.call}: "
            says += f"{len(moved)} come back in another order than they went"
            name = "pp" if "pp" in wrong.evidence.mesh.axes else ""
            yield ProofFinding("order", says, name)
            return
        first = places[0]
        says = f"{wrong.where} is another part of it than rank {first.rank} must have: parts are "
        yield ProofFinding("shards permuted", says + "permuted", axis)
    ordered: Mapping[int, float] = {
        number: relative_residual(
            one.values.reshape(-1).sort().values / wrong.usual, one.right.reshape(-1).sort().values
        )
        for number, one in enumerate(places)
    }
    off = max(relative_residual(one.values / wrong.usual, one.right) for one in places)
    if max(ordered.values()) <= min(fits, off / 2):
        says = f"{wrong.where} has the right values in another order"
        if axis:
            says += f": what is exchanged over {axis} is put together or taken apart wrongly"
        yield ProofFinding("permuted", says, axis)


def _is(one: PassedPlace, right: torch.Tensor, fits: float) -> bool:
    return right.shape == one.values.shape and fit_factor(one.values, right)[1] <= fits


_LOST = 1e-4  # weight of a microbatch that is not there, relative to the largest
_MOST_CALLS = 64  # parts of the batch that a gradient is taken to be a sum of


def explain_lost_weight(evidence: CapturedEvidence, step: int, name: str) -> ProofFinding | None:
    """Return where the gradient of a weight went; None where that was not seen."""
    ranks = evidence.run.holders(PARAMETERS, INITIAL, name)
    return _replaced(evidence, step, name, ranks) or _lost(evidence, step, name, ranks)


def _replaced(
    evidence: CapturedEvidence, step: int, name: str, ranks: Collection[int]
) -> ProofFinding | None:
    """Find a tensor in the place of the weight that has its gradient."""
    run, gradients = evidence.run, evidence.steps[step].gradients
    if set(run.holders(STAND_INS, step, name)) != set(ranks):
        return None
    right = gradients[name].double().reshape(-1)
    for rank in ranks:
        mine = evidence.run.vector(STAND_INS, step, name, rank)
        held = ~mine.isnan()
        factor, residual = fit_factor(mine[held], right[held])
        if not factor or residual > evidence.explained:
            return None
    lost = [one for one in gradients if run.parts(STAND_INS, step, one)]
    axis = " and ".join(evidence.run.split_axes(name)[1])
    over = f", reduced over {axis}" if axis else ""
    says = "zero: the model has another tensor in its place, which has the right gradient"
    says += f"{over}; the optimizer keeps {len(lost)} parameters that the model no longer has"
    return ProofFinding("parameter replaced", says, axis, value=0.0)


def _lost(
    evidence: CapturedEvidence, step: int, name: str, ranks: Collection[int]
) -> ProofFinding | None:
    """Find the right gradient at the module's output, on all ranks that hold the weight."""
    module, _, weight = name.rpartition(".")
    passed = PassedStep(evidence, step)
    compared = passed.backward.get(module)
    if compared is None or compared.wrong or {one.rank for one in compared.right} != set(ranks):
        return None
    says = f"zero: backward comes to {module} with the right gradient, and what it makes of its "
    says += f"{weight} reaches no optimizer"
    lost, axis = lost_calls(passed), ""
    if len(set(lost.values())) > 1:
        axis = _stage_axis(evidence, lost)
        says += f"; lost of other layers: {_told(lost)}"
    return ProofFinding("weight gradient lost", says, axis, value=0.0)


def _told(lost: Mapping[str, tuple[int, ...]]) -> str:
    """Return which microbatches are lost of how many layers, the first one by name."""
    texts: list[str] = []
    for calls in sorted(set(lost.values())):
        layers = [layer for layer, one in lost.items() if one == calls]
        what = f"microbatches {list(calls)}" if calls else "nothing"
        more = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
        texts.append(f"{what} of {layers[0]}{more}")
    return ", ".join(texts)


def lost_calls(passed: PassedStep) -> Mapping[str, tuple[int, ...]]:
    """Return which forward passes are not in the weight gradient of each layer of two dims.

    Of layers whose input is the output of a module, and that are the same in all else.
    """
    evidence, found = passed.evidence, dict[str, tuple[int, ...]]()
    for source, layers in passed.sources.items():
        for layer in layers:
            name, compared = f"{layer}.weight", passed.backward.get(layer)
            inputs, outputs = passed.whole(source), passed.whole(layer, gradient=True)
            shape = evidence.run.shapes.get(name, ())
            if compared is None or not compared.right or inputs is None or outputs is None:
                continue
            if shape != (outputs.shape[-1], inputs.shape[-1]):
                continue
            last = outputs.dim() - 1
            cuts = {
                tuple(part for part in one.cut if part[0] != last): one.call
                for one in compared.right
            }
            if len(cuts) <= _MOST_CALLS:
                basis = [
                    sliced(outputs, cut).flatten(0, -2).T @ sliced(inputs, cut).flatten(0, -2)
                    for cut in cuts
                ]
                seen = evidence.run.whole(GRADIENTS, passed.step, name)
                if (calls := _calls_left_out(seen, basis, list(cuts.values()))) is not None:
                    found[layer] = calls
    return found


def _calls_left_out(
    seen: torch.Tensor, basis: list[torch.Tensor], calls: list[int]
) -> tuple[int, ...] | None:
    """Return the calls whose part is not in a gradient; None where it is another sum of them."""
    if not bool(seen.isfinite().all()):
        return None
    if not float(seen.norm()):
        return tuple(sorted(set(calls)))
    weights, residual = fit_basis(seen, basis)
    if residual > _LOST:
        return None
    largest = max(map(abs, weights))
    kept = {call for call, w in zip(calls, weights, strict=True) if abs(w) > _LOST * largest}
    return tuple(sorted(set(calls) - kept))


def _stage_axis(evidence: CapturedEvidence, layers: Collection[str]) -> str:
    """Return the axes along which other ranks hold these layers."""
    run, mesh = evidence.run, evidence.mesh
    held = {layer: {*run.holders(PARAMETERS, INITIAL, f"{layer}.weight")} for layer in layers}
    return " and ".join(
        axis
        for axis in mesh.axes
        if any(
            not ranks.issuperset(mesh.group(rank, (axis,)))
            for ranks in held.values()
            for rank in ranks
        )
    )
