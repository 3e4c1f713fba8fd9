# SPDX-License-Identifier: Apache-2.0
"""The steps of a training run, sequence by sequence: loss, gradients, norm, clip, update.

Float64 throughout. The loss is the sum over the counted tokens of the global batch over their
number, plus what routers add; a step whose scaled gradients overflow is skipped where the loss is
scaled.

Shape suffixes: B sequences of the global batch, T positions, K experts of a token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from echelon.core.plan import Plan
from echelon.proof.independent.decoder import token_losses
from echelon.proof.independent.fp8 import Fp8Rules
from echelon.proof.independent.mixture import (
    RouterState,
    first_state,
    next_state,
    router_losses,
)
from echelon.proof.independent.optimizers import (
    ScaleOfLoss,
    UpdateRules,
    clip_factor,
    norm_of,
    rate_of,
)
from echelon.proof.independent.sequence import SequenceRoutes, SequenceRun
from echelon.proof.independent.weights import first_values, has_experts, weights_of
from echelon.proof.subject import ProofBatch

Values = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPass:
    """Hold what a forward pass over a global batch gives."""

    sums: Mapping[tuple[int, int], tuple[torch.Tensor, int]]
    """Sum of losses and counted tokens of each (data rank, microbatch)."""
    runs: Sequence[SequenceRun]
    """The sequences, with what the parts made of them."""
    beside: torch.Tensor
    """What routers add to the mean loss."""
    router_losses: Mapping[int, tuple[float, float]]
    """Auxiliary and z-loss of each block with experts."""

    def routes(self) -> dict[int, list[SequenceRoutes]]:
        """Return how each block routed each sequence."""
        return _routes(self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndependentStep:
    """Hold all that one step of the independent implementation computed."""

    step: int
    """The optimizer step."""
    loss: float
    """Mean loss over the counted tokens."""
    tokens: int
    """Counted tokens."""
    microbatch_losses: Mapping[tuple[int, int], tuple[float, int]]
    """Sum of losses and counted tokens of each microbatch."""
    gradients: Values
    """Gradients before clipping."""
    grad_norm: float
    """Their norm."""
    learning_rate: float
    """The learning rate."""
    loss_scale: float
    """What the loss was multiplied by before backward."""
    skipped: bool
    """Whether gradients overflowed, so that nothing changed."""
    before: Values
    """All weights before the step."""
    after: Values
    """All weights after the step."""
    routes: Mapping[int, Sequence[SequenceRoutes]]
    """How each block with experts routed each sequence."""
    router_losses: Mapping[int, tuple[float, float]]
    """Auxiliary and z-loss of each block with experts."""
    state_after: RouterState
    """What routers know for the next step."""
    fp8_after: Fp8Rules | None
    """How the next step rounds to 8 bits, if it does."""


def run_independent(
    plan: Plan, batches: Sequence[ProofBatch], *, begin: Sequence[Values] = ()
) -> tuple[IndependentStep, ...]:
    """Return the steps of `plan` over these batches.

    With `begin`, each step begins with those weights; without, with those of the step before.
    """
    run = IndependentRun(plan)
    steps: list[IndependentStep] = []
    for step, batch in enumerate(batches):
        if begin:
            run.begin_with(begin[step])
        steps.append(run.step(batch))
    return tuple(steps)


class IndependentRun:
    """A training of the independent implementation, step after step."""

    def __init__(self, plan: Plan) -> None:
        """Begin with the first weights of `plan`."""
        mathematics, model = plan.mathematics, plan.model
        values = {name: v.double() for name, v in first_values(model, mathematics.seed).items()}
        self._plan, self._steps = plan, 0
        self._rules = UpdateRules(mathematics.optimizer, weights_of(model), values)
        self._scale = ScaleOfLoss.first(mathematics.precision)
        self.state = first_state(model, [b for b in range(model.layers) if has_experts(model, b)])
        self.fp8 = Fp8Rules.first(mathematics.precision)

    @property
    def values(self) -> dict[str, torch.Tensor]:
        """Return copies of the weights."""
        return {name: value.detach().clone() for name, value in self._rules.values.items()}

    def begin_with(self, values: Values) -> None:
        """Take these weights where there are such; what is kept of earlier gradients stays."""
        self._rules.begin_with(values)

    def step(self, batch: ProofBatch) -> IndependentStep:
        """Take the next step, over `batch`."""
        known = self.state, self.fp8
        found = _step(self._plan, batch, self._steps, self._rules, self._scale, known)
        self._scale.after(overflow=found.skipped)
        self.state, self.fp8, self._steps = found.state_after, found.fp8_after, self._steps + 1
        return found


def forward(
    plan: Plan,
    values: Values,
    batch: ProofBatch,
    step: int,
    state: RouterState,
    fp8: Fp8Rules | None = None,
) -> ForwardPass:
    """Run every sequence of a global batch through the model; `fp8` says how it rounds."""
    mathematics = plan.mathematics
    values = _used(values, mathematics.precision.int8_block)
    runs: list[SequenceRun] = []
    losses: list[torch.Tensor] = []
    for row, sample in enumerate(batch.sample_ids):
        run = SequenceRun(
            model=plan.model,
            weights=values,
            balance=mathematics.balance,
            biases=state.biases,
            tokens=batch.inputs_BT[row].tolist(),
            documents=(0,) if batch.documents is None else batch.documents[row],
            sample=sample,
            step=step,
            seed=mathematics.seed,
            fp8=fp8,
        )
        losses.append(token_losses(run, batch.labels_BT[row].tolist()))
        runs.append(run)
    size = plan.layout.microbatch_sequences
    replicas = plan.mesh.dp_replicate * plan.mesh.dp_shard
    # The share of one island may have fewer microbatches than the mesh has replicas.
    per_replica = max(1, len(runs) // size // replicas)
    sums: dict[tuple[int, int], tuple[torch.Tensor, int]] = {}
    for number in range(len(runs) // size):
        rows = range(number * size, (number + 1) * size)
        counted = sum(label != -100 for row in rows for label in batch.labels_BT[row].tolist())
        total = torch.stack([losses[row].sum() for row in rows]).sum()
        sums[number // per_replica, number % per_replica] = total, counted
    beside, told = torch.zeros((), dtype=torch.float64), dict[int, tuple[float, float]]()
    if plan.model.experts is not None:
        beside, told = router_losses(
            _routes(runs), plan.model.experts, mathematics.balance, state, size
        )
    return ForwardPass(sums=sums, runs=runs, beside=beside, router_losses=told)


def _used(values: Values, block: int) -> Values:
    """Return the weights that are multiplied: in int8, the nearest multiples of their steps.

    `block` neighbours of a row have one step, the largest of them over 127. All matrices are
    rounded, but of routers and positions; a gradient passes as if nothing were.
    """
    if not block:
        return values
    found: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        found[name] = value
        if value.dim() > 1 and "router" not in name and "positions" not in name:
            found[name] = value + (_multiples(value.detach(), block) - value.detach())
    return found


def _multiples(value: torch.Tensor, block: int) -> torch.Tensor:
    rounded = value.clone()
    for row in rounded.reshape(-1, block):
        largest = float(row.abs().max())
        if largest > 0:
            step = largest / 127
            row.copy_(torch.round(row / step) * step)
    return rounded


def _routes(runs: Sequence[SequenceRun]) -> dict[int, list[SequenceRoutes]]:
    return {block: [run.routes[block] for run in runs] for block in runs[0].routes}


def _step(
    plan: Plan,
    batch: ProofBatch,
    step: int,
    rules: UpdateRules,
    scale: ScaleOfLoss,
    known: tuple[RouterState, Fp8Rules | None],
) -> IndependentStep:
    mathematics, (state, fp8) = plan.mathematics, known
    settings, factor = mathematics.optimizer, scale.scale
    before = {name: value.detach().clone() for name, value in rules.values.items()}
    passed = forward(plan, rules.values, batch, step, state, fp8)
    count = sum(number for _, number in passed.sums.values())
    loss = torch.stack([total for total, _ in passed.sums.values()]).sum() / count
    for value in rules.values.values():
        value.grad = None
    (factor * (loss + passed.beside)).backward()
    scaled = {
        name: torch.zeros_like(value) if value.grad is None else value.grad.clone()
        for name, value in ((name, rules.values[name]) for name in rules.trained)
    }
    norm, rate = norm_of(scaled) / factor, rate_of(settings, step)
    skipped = mathematics.precision.loss_scaling != "none" and not math.isfinite(norm)
    gradients = {name: gradient / factor for name, gradient in scaled.items()}
    if not skipped:
        clip = clip_factor(settings, norm)
        rules.step({name: clip * gradient for name, gradient in gradients.items()}, rate)
    return IndependentStep(
        step=step,
        loss=float(loss.detach()),
        tokens=count,
        microbatch_losses={s: (float(t.detach()), n) for s, (t, n) in passed.sums.items()},
        gradients=gradients,
        grad_norm=norm,
        learning_rate=rate,
        loss_scale=factor,
        skipped=skipped,
        before=before,
        after={name: value.detach().clone() for name, value in rules.values.items()},
        routes=passed.routes(),
        router_losses=passed.router_losses,
        fp8_after=None if fp8 is None else fp8.next(),
        state_after=state if skipped else next_state(state, passed.routes(), mathematics.balance),
    )
