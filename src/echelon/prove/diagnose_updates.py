"""What a wrong update looks like: a wrong rate, decay or clip, a slice done twice or not at all.

Where slices are updated by different ranks, only what the wrong ranks updated is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from echelon.cost.updates import update_of
from echelon.prove.checks import Evidence
from echelon.prove.diagnose_norm import name_norm
from echelon.prove.diagnosis import ROUNDING, Finding
from echelon.prove.factors import (
    EXPLAINED,
    Factor,
    close,
    fit_basis,
    fit_factor,
    known_factors,
    name_factor,
    relative_residual,
)
from echelon.prove.optimizers import State, Update, update
from echelon.prove.oracle import OracleStep
from echelon.prove.places import narrowed

_EXACT = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongUpdate:
    """Hold one wrong update, and where it is wrong: what `ranks` updated."""

    evidence: Evidence
    oracle: OracleStep
    name: str
    observed: torch.Tensor
    where: torch.Tensor
    ranks: tuple[int, ...]

    @property
    def seen(self) -> torch.Tensor:
        """Return what was added to the elements that are wrong."""
        return self.observed[self.where]

    @property
    def main(self) -> torch.Tensor:
        """Return the right part of the gradients."""
        return self.oracle.updates[self.name].main[self.where].double()

    @property
    def decay(self) -> torch.Tensor:
        """Return the right part of the weight decay."""
        return self.oracle.updates[self.name].decay[self.where].double()


def explain_update(evidence: Evidence, step: int, name: str) -> tuple[Finding, tuple[int, ...]]:
    """Return what is wrong with what the optimizer added to `name`, its gradient being right."""
    oracle = evidence.oracle[step]
    if oracle.skipped:
        says = "updated in a step whose gradients overflowed"
        return Finding(factor="not skipped", says=says), ()
    wrong = _locate(evidence, oracle, name)
    if not wrong.ranks:
        wrong = replace(wrong, where=torch.ones_like(wrong.where))
    finding = next(_findings(wrong), None) or Finding(
        factor="none", says="another update: no factor of its parts explains it"
    )
    # Other tensors of the step count too: all of this one may lie in the slice of one rank.
    ranks = {r for other in oracle.updates for r in _locate(evidence, oracle, other).ranks}
    everyone = range(evidence.plan.mesh.world_size)
    expert = evidence.observed.specs[name].expert is not None
    return narrowed(evidence.plan, finding, ranks, everyone, expert=expert), wrong.ranks


def _locate(evidence: Evidence, oracle: OracleStep, name: str) -> WrongUpdate:
    """Find the ranks whose part of an update is wrong: who has a gradient updates with it."""
    right = oracle.updates[name].total.double()
    seen = evidence.observed.update(oracle.step, name)
    allowed = evidence.tolerance.allowed("updates", oracle.step, name) * float(right.norm())
    where = torch.zeros(right.shape, dtype=torch.bool)
    ranks: set[int] = set()
    for piece in evidence.observed.pieces("gradients", oracle.step, name):
        if not float((seen[piece.region] - right[piece.region]).norm()) <= allowed / 2:
            where[piece.region] = True
            ranks.add(piece.rank)
    return WrongUpdate(
        evidence=evidence,
        oracle=oracle,
        name=name,
        observed=seen,
        where=where,
        ranks=tuple(sorted(ranks)),
    )


def _findings(wrong: WrongUpdate) -> Iterator[Finding]:
    yield from _not_there(wrong)
    known = known_factors(wrong.evidence.plan, wrong.oracle)
    yield from _clip_epsilon(wrong)
    yield from _repeated(wrong)
    decays = bool(wrong.decay.norm())
    if decays:
        weights, residual = fit_basis(wrong.seen, (wrong.main, wrong.decay))
        if residual < EXPLAINED:
            yield _name_parts(weights[0], weights[1], known, residual)
    factor, residual = fit_factor(wrong.seen, wrong.main)
    if residual < EXPLAINED:
        if not close(factor, 1.0):
            yield _learning_rate(factor, known, residual)
        elif decays:
            yield Finding(factor="zero", says="weight decay is missing", value=0.0)
        else:
            yield Finding(factor="none", says=ROUNDING, residual=residual)
    yield from _clip(wrong)


def _not_there(wrong: WrongUpdate) -> Iterator[Finding]:
    if not bool(wrong.seen.isfinite().all()):
        yield Finding(factor="not finite", says="not finite")
    elif not float(wrong.seen.norm()):
        yield Finding(factor="zero", says="not updated at all", value=0.0)


def _repeated(wrong: WrongUpdate) -> Iterator[Finding]:
    """Find the optimizer run twice on one slice, counting the second time as a step or not."""
    oracle = wrong.oracle
    for counts in (True, False):
        state = _state_before(wrong)
        value = oracle.before[wrong.name]
        first = _update(wrong, oracle, value, state)
        if not counts:
            state.num_updates -= 1
        second = _update(wrong, oracle, value + first.total, state)
        twice = (first.total + second.total)[wrong.where].double()
        residual = relative_residual(wrong.seen, twice)
        if residual < EXPLAINED:
            says = "updated twice in one step"
            yield Finding(factor="twice", says=says, value=2.0, residual=residual)
            return


def _state_before(wrong: WrongUpdate) -> State:
    """Return what the optimizer remembers of the tensor when the step begins."""
    state = State()
    for oracle in wrong.evidence.oracle[: wrong.oracle.step]:
        if not oracle.skipped:
            _update(wrong, oracle, oracle.before[wrong.name], state)
    return state


def _update(wrong: WrongUpdate, oracle: OracleStep, value: torch.Tensor, state: State) -> Update:
    spec = wrong.evidence.observed.specs[wrong.name]
    gradient = oracle.gradients[wrong.name].to(value.dtype) * oracle.clip_scale
    optimizer = wrong.evidence.plan.mathematics.optimizer
    return update(spec, value, gradient, state, optimizer, oracle.learning_rate)


def _name_parts(adam: float, decay: float, known: tuple[Factor, ...], residual: float) -> Finding:
    if close(adam, 1.0) and close(decay, 1.0):
        return Finding(factor="none", says=ROUNDING, residual=residual)
    if close(adam, decay):
        return _learning_rate(adam, known, residual)
    if close(adam, 1.0):
        named = name_factor(decay, known, residual)
        times = "is missing" if close(decay, 0.0) else f"is applied {decay:.6g} times"
        return Finding(
            factor=named.factor,
            says=f"weight decay {times}",
            value=decay,
            residual=residual,
        )
    says = f"{adam:.6g} x the gradients' part + {decay:.6g} x the weight decay"
    return Finding(factor="parts weighted", says=says, value=adam, residual=residual)


def _learning_rate(factor: float, known: tuple[Factor, ...], residual: float) -> Finding:
    named = name_factor(factor, known, residual)
    return Finding(
        factor=named.factor,
        says=f"the learning rate is {factor:.6g} times the right one",
        axis=named.axis,
        value=factor,
        residual=residual,
    )


def _clip_epsilon(wrong: WrongUpdate) -> Iterator[Finding]:
    """Know torch's own clipping, which divides by the norm + 1e-6, from rounding."""
    oracle, clip_norm = wrong.oracle, wrong.evidence.plan.mathematics.optimizer.clip_norm
    scale, residual = _scale_behind(wrong)
    if clip_norm is None or residual > _EXACT:
        return
    padded = clip_norm / (oracle.grad_norm + 1e-6)
    if abs(scale / padded - 1) > _EXACT or abs(scale / oracle.clip_scale - 1) < _EXACT:
        return
    says = "clipped by the norm + 1e-6, as torch.nn.utils.clip_grad_norm_ does"
    yield Finding(factor="clip epsilon", says=says, value=scale / oracle.clip_scale)


def _clip(wrong: WrongUpdate) -> Iterator[Finding]:
    """Name the scale of the gradient behind the first update."""
    evidence, oracle = wrong.evidence, wrong.oracle
    scale, residual = _scale_behind(wrong)
    # The inverse magnifies rounding where the share is near 1.
    if residual > 1e3 * EXPLAINED or not scale:
        return
    if close(scale, 1.0):
        yield Finding(factor="clip", says="the gradient was not clipped", value=1.0)
        return
    clip_norm = evidence.plan.mathematics.optimizer.clip_norm
    if clip_norm is not None:
        named = name_norm(evidence, oracle, clip_norm / scale)
        if named is not None:
            says = f"clipped by a wrong norm: {named.says}"
            yield Finding(factor="partial norm", says=says, axis=named.axis, value=named.value)
            return
    ratio = scale / oracle.clip_scale
    named = name_factor(ratio, known_factors(evidence.plan, oracle), residual)
    says = f"the update is that of a gradient {ratio:.6g} times the clipped one"
    yield Finding(factor=named.factor, says=says, axis=named.axis, value=ratio)


def _scale_behind(wrong: WrongUpdate) -> tuple[float, float]:
    """Invert a first AdamW update to the gradient behind it; return its scale and residual.

    In the first step both moments are the gradient's own: u = -lr g / (|g| + eps), so |g| is
    eps |u / lr| / (1 - |u / lr|). Later steps cannot be inverted: their residual is infinite.
    """
    plan, oracle = wrong.evidence.plan, wrong.oracle
    spec = wrong.evidence.observed.specs[wrong.name]
    if oracle.step or update_of(plan.mathematics.optimizer, spec) != "adamw":
        return 0.0, float("inf")
    share = -(wrong.seen - wrong.decay) / oracle.learning_rate
    gradient = plan.mathematics.optimizer.eps * share / (1 - share.abs())
    return fit_factor(gradient, oracle.gradients[wrong.name][wrong.where])
