"""The comparisons of whole tensors: gradients, updates, values, and what is rounded from them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from echelon.prove.checks import Check, Evidence, relative_error, tensor_error
from echelon.prove.oracle import TORCH_DTYPES
from echelon.prove.ranks import INITIAL
from echelon.prove.tolerance import FLOOR


def gradients(evidence: Evidence) -> Iterator[Check]:
    """Compare every gradient, from the last parameter to the first, as backward makes them.

    Gradients that overflowed are not numbers to compare; that the step was skipped is a claim of
    its own.
    """
    for oracle in evidence.oracle:
        if not oracle.skipped:
            yield from _tensor_checks(
                evidence, "gradients", oracle.step, oracle.gradients, backward=True
            )


def updates(evidence: Evidence) -> Iterator[Check]:
    """Compare what each step added to every value that the optimizer keeps."""
    for oracle in evidence.oracle:
        updates = {name: update.total for name, update in oracle.updates.items()}
        floor = FLOOR * length_of_all(updates)
        for position, (name, update) in enumerate(updates.items()):
            seen = evidence.observed.update(oracle.step, name)
            yield Check(
                step=oracle.step,
                subject=name,
                error=relative_error(seen, update, floor),
                allowed=0.0
                if oracle.skipped
                else evidence.tolerance.allowed("updates", oracle.step, name),
                detail="changed in a step that is skipped" if oracle.skipped else "",
                position=position,
            )


def parameters(evidence: Evidence) -> Iterator[Check]:
    """Compare every parameter after the last step, and its master copy where there is one."""
    last = evidence.oracle[-1]
    if evidence.observed.tells_masters:
        yield from _tensor_checks(evidence, "masters", last.step, last.after)
    yield from _tensor_checks(evidence, "parameters", last.step, last.after)


def written_back(evidence: Evidence) -> Iterator[Check]:
    """Compare every parameter with the rounding of its master copy, bit for bit."""
    observed = evidence.observed
    if not observed.tells_masters:
        return
    dtype = TORCH_DTYPES[evidence.plan.mathematics.precision.parameters]
    for step in (INITIAL, *(oracle.step for oracle in evidence.oracle)):
        for position, name in enumerate(observed.specs):
            master = observed.whole("masters", step, name).to(dtype)
            odd = [
                piece.rank
                for piece in observed.pieces("parameters", step, name)
                if not observed.fits(piece) or not torch.equal(piece.tensor, master[piece.region])
            ]
            ranks = sorted(set(odd))
            yield Check(
                step=step,
                subject=name,
                error=1.0 if odd else 0.0,
                allowed=0.0,
                detail=f"on ranks {ranks} it is not the rounding of its master copy" * bool(odd),
                position=position,
            )


def replicas(evidence: Evidence) -> Iterator[Check]:
    """Compare every copy of a value with that of its primary holder, bit for bit."""
    observed = evidence.observed
    kinds = ("parameters", "masters") if observed.tells_masters else ("parameters",)
    for oracle in evidence.oracle:
        for kind in kinds:
            for position, name in enumerate(observed.specs):
                whole = observed.whole(kind, oracle.step, name)
                odd = {
                    piece.rank
                    for piece in observed.pieces(kind, oracle.step, name)
                    if not observed.fits(piece)
                    or not torch.equal(piece.tensor.double(), whole[piece.region])
                }
                ranks = f"ranks {sorted(odd)} differ from the primary holder"
                yield Check(
                    step=oracle.step,
                    subject=name,
                    error=1.0 if odd else 0.0,
                    allowed=0.0,
                    detail=ranks * bool(odd),
                    position=position,
                )


def length_of_all(tensors: Mapping[str, torch.Tensor]) -> float:
    """Return the norm of all tensors together."""
    return math.sqrt(sum(float(value.double().square().sum()) for value in tensors.values()))


def _tensor_checks(
    evidence: Evidence,
    kind: str,
    step: int,
    oracle: Mapping[str, torch.Tensor],
    *,
    backward: bool = False,
) -> Iterator[Check]:
    total = length_of_all(oracle)
    names = list(oracle)
    for position, name in enumerate(reversed(names) if backward else names):
        scale = max(float(oracle[name].double().norm()), FLOOR * total)
        error = tensor_error(evidence.observed, kind, step, name, oracle[name])
        yield Check(
            step=step,
            subject=name,
            error=error / scale if scale else error,
            allowed=evidence.tolerance.allowed(kind, step, name),
            detail="the master copy" if kind == "masters" else "",
            position=position,
        )
