# SPDX-License-Identifier: Apache-2.0
"""Why a weight of a program has no gradient, where the backward pass did come to its module.

Either the model has another tensor in its place, which gets the gradient, or what modules make of
their weights is lost on the way, of all microbatches or of some.

Shape suffixes: N tokens, I inputs, O outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from echelon.proof.causes.finding import ProofFinding
from echelon.proof.causes.passing.places import PassedStep, sliced
from echelon.proof.evidence.captured import STAND_INS
from echelon.proof.evidence.evidence import CapturedEvidence
from echelon.proof.evidence.fits import fit_basis, fit_factor
from echelon.proof.evidence.run import GRADIENTS, INITIAL, PARAMETERS

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
