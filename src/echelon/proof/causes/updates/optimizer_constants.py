# SPDX-License-Identifier: Apache-2.0
"""What a wrong update looks like whose optimizer has other constants: count, epsilon, betas.

The gradients and the moments before are right, so the formula is run again with each constant
changed, or solved for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from echelon.core.parameters import ParameterSpec
from echelon.core.plan import Optimizer
from echelon.layout.stage import update_rule_of
from echelon.proof.causes.finding import ProofFinding
from echelon.proof.evidence.fits import EXPLAINED, nearly_equal, relative_residual
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
