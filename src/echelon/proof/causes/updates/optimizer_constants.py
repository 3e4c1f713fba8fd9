# SPDX-License-Identifier: Apache-2.0
"""What an optimizer counts and keeps: other counts, epsilons or betas, other state.

The gradients and the moments before are right, so the formula of a plan is run again with each
constant changed, or solved for it. Of a program the moments are read, and say the betas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch

from echelon.core.parameters import ParameterSpec
from echelon.core.plan import Optimizer
from echelon.layout.stage import update_rule_of
from echelon.proof.causes.factors import named_factor
from echelon.proof.causes.finding import ProofFinding, with_distinguishing_axis
from echelon.proof.claims.checks import Check
from echelon.proof.evidence.evidence import CapturedEvidence
from echelon.proof.evidence.fits import EXPLAINED, fit_factor, nearly_equal, relative_residual
from echelon.proof.evidence.run import ReferenceStep
from echelon.proof.oracle.optimizers import OptimizerState, TensorUpdate, update
from echelon.proof.oracle.oracle import OracleStep

_STEADY = 1e-6  # relative spread of an epsilon over elements

_FURTHEST_COUNT = 4  # updates ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedUpdate:
    """Hold one update that is wrong where `where` says, and the steps up to it."""

    spec: ParameterSpec
    optimizer: Optimizer
    steps: tuple[OracleStep, ...]
    where: torch.Tensor
    seen: torch.Tensor
    """What was added to the elements that are wrong."""

    @property
    def last(self) -> OracleStep:
        """Return the step of the update."""
        return self.steps[-1]

    def again(self, optimizer: Optimizer, *, ahead: int = 0, skipped: bool = False) -> TensorUpdate:
        """Return the update by other constants, the count `ahead` of the right one.

        Steps that an overflow skips count too if `skipped`.
        """
        state = OptimizerState()
        for one in self.steps[:-1]:
            if not one.skipped:
                self.update(one, optimizer, state)
            elif skipped:
                state.num_updates += 1
        state.num_updates += ahead
        return self.update(self.last, optimizer, state)

    def update(
        self,
        oracle: OracleStep,
        optimizer: Optimizer,
        state: OptimizerState,
        value: torch.Tensor | None = None,
    ) -> TensorUpdate:
        """Return the update of a step, of its own value or of another, and advance `state`."""
        name = self.spec.name
        value = oracle.before[name] if value is None else value
        gradient = oracle.gradients[name].to(value.dtype) * oracle.clip_scale
        return update(self.spec, value, gradient, state, optimizer, oracle.learning_rate)

    def fits(self, tried: torch.Tensor) -> float:
        """Return what an update leaves unexplained."""
        return relative_residual(self.seen, tried[self.where].double())


def explain_constants(replayed: ReplayedUpdate) -> Iterator[ProofFinding]:
    """Find a constant of the optimizer that makes the wrong update."""
    if update_rule_of(replayed.optimizer, replayed.spec) == "adamw":
        yield from _count(replayed)
        yield from _epsilon(replayed)
        yield from _betas(replayed)


def _count(replayed: ReplayedUpdate) -> Iterator[ProofFinding]:
    """Find a bias correction by the number of another update."""
    taken = sum(not one.skipped for one in replayed.steps[:-1])
    skipped = len(replayed.steps) - 1 - taken
    if skipped:
        again = replayed.again(replayed.optimizer, skipped=True)
        if (residual := replayed.fits(again.total)) < EXPLAINED:
            says = "skipped steps count as updates in the bias correction"
            yield ProofFinding("update count", says, value=skipped, residual=residual)
            return
    for ahead in (*range(-1, -taken - 1, -1), *range(1, _FURTHEST_COUNT + 1)):
        residual = replayed.fits(replayed.again(replayed.optimizer, ahead=ahead).total)
        if residual < EXPLAINED:
            says = f"bias correction of update {taken + 1 + ahead} instead of {taken + 1}"
            yield ProofFinding(
                "update count", f"{says}: off by {ahead}", value=ahead, residual=residual
            )
            return


def _epsilon(replayed: ReplayedUpdate) -> Iterator[ProofFinding]:
    """Solve main = -rate mean / (root + eps) for eps, element by element."""
    optimizer, oracle, where = replayed.optimizer, replayed.last, replayed.where
    plain = replace(optimizer, eps=0.0)
    decay = oracle.updates[replayed.spec.name].decay[where].double()
    seen = replayed.seen - decay
    # Without epsilon the update is -rate mean / root; with it, mean / (root + eps).
    signs = replayed.again(plain).main[where].double()
    right = oracle.updates[replayed.spec.name].main[where].double()
    usable = (seen != 0) & (right != signs) & right.isfinite() & signs.isfinite() & (right != 0)
    if int(usable.sum()) < 2:
        return
    seen, signs, right = seen[usable], signs[usable], right[usable]
    root = optimizer.eps * right / (signs - right)
    eps = root * (signs / seen - 1)
    found = float(eps.median())
    large = root < 1e3 * abs(found)
    if not bool(large.any()) or found <= 0 or nearly_equal(found, optimizer.eps):
        return
    if float((eps[large] / found - 1).abs().max()) <= _STEADY:
        residual = replayed.fits(replayed.again(replace(optimizer, eps=found)).total)
        if residual < EXPLAINED:
            says = f"its epsilon is {found:.4g} instead of {optimizer.eps:.4g}"
            yield ProofFinding("epsilon", says, value=found, residual=residual)


def _betas(replayed: ReplayedUpdate) -> Iterator[ProofFinding]:
    one = replayed.optimizer
    residual = replayed.fits(replayed.again(replace(one, beta1=one.beta2, beta2=one.beta1)).total)
    if residual < EXPLAINED and one.beta1 != one.beta2:
        says = "its two betas are taken for one another"
        yield ProofFinding("betas swapped", says, residual=residual)


_VALUE = "value"

_WORDS = {"exp_avg": "first moment", "exp_avg_sq": "second moment"}
"""What users call the running sums of AdamW."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """Hold what an optimizer keeps of a tensor at one time: the value, and sums by name."""

    value: torch.Tensor
    sums: Mapping[str, torch.Tensor]

    def with_parts_of(self, other: _Kept, parts: Sequence[str]) -> _Kept:
        """Return the same, but for the parts that are another's; a sum that is missing is zero."""
        sums = {name: other.sums[name] for name in parts if name in other.sums}
        own = {name: one for name, one in self.sums.items() if name not in parts}
        return _Kept(other.value if _VALUE in parts else self.value, {**own, **sums})


def explain_state(
    replayed: ReplayedUpdate, others: Sequence[ReplayedUpdate]
) -> Iterator[ProofFinding]:
    """Find the state of an earlier update, or of one of `others`, behind a wrong update.

    What follows for all of `replayed.where` must follow from it.
    """
    *before, now, _ = kept = _history(replayed)
    parts = (*dict.fromkeys(name for one in kept for name in one.sums), _VALUE)
    for ago, one in enumerate(reversed(before), start=1):
        for taken in _subsets(parts):
            if _fits(replayed, now.with_parts_of(one, taken)):
                when = f"as of {ago} update{'s' * (ago > 1)} before"
                zero = " (zero)" if ago == len(before) and _VALUE not in taken else ""
                yield ProofFinding("stale", f"made from the {_told(taken)} {when}{zero}")
                return
    for other in others:
        *_, then, after = _history(other)
        for one, taken in ((one, taken) for one in (then, after) for taken in _subsets(parts)):
            if _fits(replayed, now.with_parts_of(one, taken)):
                when = ", as of after this step" if one is after else ""
                says = f"made from the {_told(taken)} of {other.spec.name}{when}"
                yield ProofFinding("another's state", says)
                return


def _history(replayed: ReplayedUpdate) -> list[_Kept]:
    """Return what was kept before each update that was taken, before the last, and after it."""
    state, name = OptimizerState(), replayed.spec.name
    kept: list[_Kept] = []
    for one in replayed.steps:
        last = one is replayed.steps[-1]
        if last or not one.skipped:
            kept.append(_Kept(one.before[name], dict(state.sums)))
            replayed.update(one, replayed.optimizer, state)
    last = replayed.last
    return [*kept, _Kept(last.after[name], dict(state.sums))]


def _fits(replayed: ReplayedUpdate, kept: _Kept) -> bool:
    count = sum(not one.skipped for one in replayed.steps[:-1])
    state = OptimizerState(sums=dict(kept.sums), num_updates=count)
    made = replayed.update(replayed.last, replayed.optimizer, state, kept.value)
    right = replayed.last.before[replayed.spec.name]
    return replayed.fits(kept.value + made.total - right) < EXPLAINED


def _subsets(parts: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield what may be another's: all of it first, then the sums, then less."""
    for number in range(len(parts), 0, -1):
        yield from combinations(parts, number)


def _told(parts: Sequence[str]) -> str:
    *most, last = (_WORDS.get(part, part) for part in parts)
    return f"{', '.join(most)} and {last}" if most else last


ADAM_EPSILON = 1e-8  # of the gradient's root mean square: torch's default
_COUNTS_OFF = (1, 2, -1, -2)  # steps by which a count is tried
_COUNT_FITS = 1e-4  # relative residual; another epsilon is more


def other_count(
    first: ReferenceStep, step: ReferenceStep, name: str, main: torch.Tensor, held: torch.Tensor
) -> Iterator[ProofFinding]:
    """Find Adam's update with its bias corrected for another number of steps.

    Its betas are what the first step kept of the gradient; `main` is the update without decay.
    """
    rate = step.rates.get(name, (0.0, 0.0))[0]
    keys = ("exp_avg", "exp_avg_sq")
    if not rate or any(name not in one.state.get(key, {}) for key in keys for one in (first, step)):
        return
    gradient = first.clipped(name).double().reshape(-1)
    kept = [first.state[key][name].double().reshape(-1) for key in keys]
    betas = [
        1 - fit_factor(value, one)[0]
        for value, one in zip(kept, (gradient, gradient.square()), strict=True)
    ]
    average, square = (step.state[key][name].double()[held] for key in keys)
    for off in _COUNTS_OFF:
        count = step.step + 1 + off
        if count < 1:
            continue
        corrections = [1 - beta**count for beta in betas]
        root = (square / corrections[1]).sqrt() + ADAM_EPSILON
        if relative_residual(main, -rate * average / corrections[0] / root) < _COUNT_FITS:
            says = f"the update of step number {count}, and it is number {step.step + 1}: the "
            says += f"optimizer has counted {off:+d}"
            yield ProofFinding("update count", says, value=float(off))


def wrong_ranks(held: Mapping[int, torch.Tensor], right: torch.Tensor, limit: float) -> list[int]:
    """Ranks whose elements, NaN where they have none, are further off than a limit."""
    off = {rank: (value - right)[~value.isnan()] for rank, value in held.items()}
    return [rank for rank, difference in off.items() if not float(difference.norm()) <= limit]


def explain_optimizer_state(evidence: CapturedEvidence, failure: Check) -> ProofFinding:
    """Explain wrong optimizer state of a program."""
    step, name, key = evidence.steps[failure.step], failure.subject, failure.detail
    right = step.state[key][name].double().reshape(-1)
    limit = failure.allowed * float(right.norm()) / 2
    held = evidence.run.vectors(key, failure.step, name)
    wrong = wrong_ranks(held, right, limit)
    rank = (wrong or list(held))[0]
    mine = ~held[rank].isnan()
    finding = _state_finding(evidence, step, (name, key), held[rank][mine], mine)
    finding = replace(finding, ranks=tuple(sorted(wrong or held)))
    return with_distinguishing_axis(evidence.axes(), finding, wrong or list(held), held)


def _state_finding(
    evidence: CapturedEvidence,
    step: ReferenceStep,
    what: tuple[str, str],
    seen: torch.Tensor,
    mine: torch.Tensor,
) -> ProofFinding:
    name, key = what
    right = step.state[key][name].double().reshape(-1)[mine]
    if not bool(seen.isfinite().all()):
        return ProofFinding("not finite", f"{key} is not finite")
    if not float(seen.norm()):
        return ProofFinding("zero", f"{key} is zero", value=0.0)
    if step.step:
        old = evidence.steps[step.step - 1].state[key][name].double().reshape(-1)[mine]
        if relative_residual(seen, old) < evidence.explained:
            return ProofFinding("stale", f"{key} is that of the step before")
        gradient = evidence.wanted_gradient(step.step, name).reshape(-1)[mine]
        fresh = gradient.square() if key == "exp_avg_sq" else gradient
        factor, residual = fit_factor(seen, fresh)
        if residual < evidence.explained:
            says = f"{key} is of this step's gradient alone ({factor:.4g} times it): what was kept "
            return _lost_kinds(evidence, step, name, says + "before is lost", factor)
        if (finding := _state_of_another(evidence, step, what, seen - right, mine)) is not None:
            return finding
    factor, residual = fit_factor(seen, right)
    if residual < evidence.explained:
        told = named_factor(evidence, step, factor, residual)
        says = f"{key} is {told.description}"
        return ProofFinding(told.factor, says, told.axis, value=factor, residual=residual)
    return ProofFinding("none", f"{key} is another than that of one device")


def _lost_kinds(
    evidence: CapturedEvidence, step: ReferenceStep, name: str, says: str, factor: float
) -> ProofFinding:
    """Return the finding of lost state; right kinds beside it show a partial checkpoint."""
    held = {
        key: (evidence.run.whole(key, step.step, name), values[name].double())
        for key, values in step.state.items()
        if name in values and evidence.run.parts(key, step.step, name)
    }
    right = [key for key, pair in held.items() if relative_residual(*pair) < evidence.explained]
    if not right:
        return ProofFinding("lost", says, value=factor)
    lost = [key for key in held if key not in right]
    says += (
        f"; {' and '.join(right)} went on: what was saved and loaded has no {' and '.join(lost)}"
    )
    return ProofFinding("state kinds lost", says, value=factor)


def _state_of_another(
    evidence: CapturedEvidence,
    step: ReferenceStep,
    what: tuple[str, str],
    difference: torch.Tensor,
    mine: torch.Tensor,
) -> ProofFinding | None:
    """Find the state of another parameter behind a running mean that goes on from it."""
    name, key = what
    before = evidence.steps[step.step - 1].state[key]
    own = before[name].double().reshape(-1)[mine]
    for other, value in before.items():
        if other == name or value.shape != before[name].shape:
            continue
        factor, residual = fit_factor(difference, value.double().reshape(-1)[mine] - own)
        if 0 < factor <= 1 and residual < evidence.explained:
            says = f"{key} goes on from that of {other} after the step before: the optimizer has "
            says += "another order of parameters than the state that it was given"
            return ProofFinding("state of another", says, value=factor, residual=residual)
    return None
