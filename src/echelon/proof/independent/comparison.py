# SPDX-License-Identifier: Apache-2.0
"""The oracle beside the independent implementation: claims, and the part that differs first.

Everything that one device computes in a proof is compared in float64, step by step. Both start from
the seed, and each later step of the independent one begins with the oracle's weights: two right
runs that each went on by itself drift apart, by a factor of hundreds in a step where Muon makes a
gradient orthogonal that is nearly of lower rank. Moments, counts, scales and what routers know are
each run's own. The first difference in the order of causes is the one that is told.

Shape suffixes: B sequences, T positions, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from echelon.core.plan import Plan
from echelon.core.rulebook.prove import PROVE_INDEPENDENT
from echelon.proof.claims.checks import Check, exact_check, relative_error
from echelon.proof.claims.claims import ClaimResult, judged
from echelon.proof.evidence.fits import FLOOR
from echelon.proof.evidence.run import INITIAL
from echelon.proof.evidence.tolerance import FLOAT64_TOLERANCE
from echelon.proof.independent.hugging_face.beside import class_beside, transformers_checks
from echelon.proof.independent.optimizers import decays, norm_of
from echelon.proof.independent.reading import (
    learning_rates,
    mixed_batches,
    proof_batches,
    trainer_batches,
)
from echelon.proof.independent.training import IndependentStep, run_independent
from echelon.proof.independent.weights import first_values, weights_of
from echelon.proof.oracle.batches import global_batch
from echelon.proof.oracle.oracle import OracleStep, initial_parameters, run_oracle
from echelon.proof.subject import ProofBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoRuns:
    """Hold a plan, its batches, and the steps of both implementations."""

    plan: Plan
    batches: Sequence[ProofBatch]
    oracle: Sequence[OracleStep]
    independent: Sequence[IndependentStep]

    @classmethod
    def of(cls, plan: Plan, num_steps: int) -> TwoRuns:
        """Run a shrunk float64 plan in both."""
        batches = [global_batch(plan, step) for step in range(num_steps)]
        oracle = run_oracle(plan, num_steps)
        begin = [{}, *(one.before for one in oracle[1:])]
        return cls(
            plan=plan,
            batches=batches,
            oracle=oracle,
            independent=run_independent(plan, batches, begin=begin),
        )

    def pairs(self) -> Iterator[tuple[OracleStep, IndependentStep]]:
        """Yield each step of both."""
        return zip(self.oracle, self.independent, strict=True)


def compare(runs: TwoRuns) -> tuple[ClaimResult, ...]:
    """Return how each comparison of the two fares; those without anything to compare are left."""
    notes = {TRANSFORMERS: class_beside(runs.plan)}
    results = (
        judged(PROVE_INDEPENDENT, statement, list(checks(runs)), notes.get(statement, ""))
        for statement, checks in COMPARISONS.items()
    )
    return tuple(result for result in results if result.compared)


def _own_batches(runs: TwoRuns) -> Iterator[Check]:
    yield from proof_batches(runs.plan, runs.batches)


def _trainer(runs: TwoRuns) -> Iterator[Check]:
    yield from trainer_batches(runs.plan, len(runs.batches))
    yield from mixed_batches(runs.plan, len(runs.batches))


def _rates(runs: TwoRuns) -> Iterator[Check]:
    yield from learning_rates(runs.plan)


def _first_values(runs: TwoRuns) -> Iterator[Check]:
    oracle = initial_parameters(runs.plan)
    right = first_values(runs.plan.model, runs.plan.mathematics.seed)
    names = f"weights are {sorted(oracle.keys() ^ right.keys())[:4]} apart"
    yield exact_check(INITIAL, "names of weights", names * (oracle.keys() != right.keys()), -1)
    for position, (name, value) in enumerate(right.items()):
        if name in oracle:
            same = oracle[name].shape == value.shape and torch.equal(oracle[name], value)
            error = 0.0 if same else max(_error(oracle[name], value), 5e-324)
            yield Check(INITIAL, name, error, position=position)


def _routes(runs: TwoRuns) -> Iterator[Check]:
    """Compare the experts of each token, those that had no room, and the gates."""
    for oracle, independent in runs.pairs():
        for block, routes in independent.routes.items():
            routed = oracle.routed[block]
            chosen_BTK = torch.tensor([one.chosen for one in routes])
            kept_BTK = torch.tensor([one.kept for one in routes])
            gates_BTK = torch.stack([one.gates_TK.detach() for one in routes])
            wrong = (routed.picked_BTK.sort(-1)[0] != chosen_BTK.sort(-1)[0]).any(-1)
            problem = f"{int(wrong.sum())} tokens go to other experts" * bool(wrong.any())
            yield exact_check(oracle.step, f"experts of layers.{block}", problem, 3 * block)
            wrong = routed.kept_BTK != kept_BTK
            problem = f"{int(wrong.sum())} assignments are dropped or not" * bool(wrong.any())
            yield exact_check(oracle.step, f"drops of layers.{block}", problem, 3 * block + 1)
            yield Check(
                oracle.step,
                f"gates of layers.{block}",
                _error(routed.gates_BTK, gates_BTK),
                allowed=FLOAT64_TOLERANCE,
                position=3 * block + 2,
            )


def _balance(runs: TwoRuns) -> Iterator[Check]:
    """Compare auxiliary and z-losses, and what routers know after each step."""
    for oracle, independent in runs.pairs():
        after, right = oracle.routing_after, independent.state_after
        for block, (auxiliary, z) in independent.router_losses.items():
            routed = oracle.routed[block]
            biases = right.biases.get(block, torch.zeros(1))
            for place, (what, found, wanted) in enumerate(
                (
                    ("auxiliary loss", _wide(routed.aux_loss), _wide(auxiliary)),
                    ("z-loss", _wide(routed.z_loss), _wide(z)),
                    ("router bias", after.biases.get(block, torch.zeros(1)), biases),
                    ("shares of loads", after.shares[block], _wide(right.shares[block])),
                )
            ):
                yield Check(
                    oracle.step,
                    f"{what} of layers.{block}",
                    _error(found, wanted),
                    allowed=FLOAT64_TOLERANCE,
                    position=4 * block + place,
                )


def _losses(runs: TwoRuns) -> Iterator[Check]:
    for oracle, independent in runs.pairs():
        pairs = zip(
            oracle.microbatch_losses.items(), independent.microbatch_losses.items(), strict=True
        )
        for position, ((slot, found), (right_slot, right)) in enumerate(pairs):
            where = f"loss of dp {slot[0]} microbatch {slot[1]}"
            if slot != right_slot or found[1] != right[1]:
                problem = f"{found[1]} tokens count instead of {right[1]}"
                yield exact_check(oracle.step, where, problem, position)
                continue
            yield _number(oracle.step, where, found[0], right[0], position)
        yield _number(oracle.step, "loss of the global batch", oracle.loss, independent.loss, 10**6)


def gradient_checks(runs: TwoRuns) -> Iterator[Check]:
    """Compare every gradient of the steps that are taken."""
    for oracle, independent in runs.pairs():
        if not (oracle.skipped and independent.skipped):
            yield from _tensors(oracle.step, oracle.gradients, independent.gradients, backward=True)


def _transformers(runs: TwoRuns) -> Iterator[Check]:
    yield from transformers_checks(runs.plan, runs.oracle, runs.batches)


def _norms(runs: TwoRuns) -> Iterator[Check]:
    """Compare norms, learning rates and loss scales, and which steps are skipped."""
    for oracle, independent in runs.pairs():
        step = oracle.step
        did = {True: "is skipped", False: "is taken"}
        problem = f"a step that {did[independent.skipped]} {did[oracle.skipped]}"
        yield exact_check(step, "skipped step", problem * (oracle.skipped != independent.skipped))
        yield _number(step, "loss scale", oracle.loss_scale, independent.loss_scale, 1)
        if not independent.skipped:
            yield _number(step, "gradient norm", oracle.grad_norm, independent.grad_norm, 2)
        yield _number(step, "learning rate", oracle.learning_rate, independent.learning_rate, 3)


def _decay_groups(runs: TwoRuns) -> Iterator[Check]:
    """Compare which weights decay: the decay is a part of its own of every update."""
    settings = runs.plan.mathematics.optimizer
    facts = weights_of(runs.plan.model)
    for oracle, independent in runs.pairs():
        if oracle.skipped or not settings.weight_decay or not independent.learning_rate:
            continue
        for position, (name, added) in enumerate(oracle.updates.items()):
            right = decays(settings, facts[name]) and bool(oracle.before[name].any())
            told = {True: "decays", False: "does not decay"}
            problem = f"it {told[bool(added.decay.any())]}, and {told[right]} by the rule"
            differs = right != bool(added.decay.any())
            yield exact_check(oracle.step, name, problem * differs, position)


def _updates(runs: TwoRuns) -> Iterator[Check]:
    for oracle, independent in runs.pairs():
        found = {name: one.total for name, one in oracle.updates.items()}
        right = {n: independent.after[n] - independent.before[n] for n in independent.after}
        yield from _tensors(oracle.step, found, right)


def _parameters(runs: TwoRuns) -> Iterator[Check]:
    for oracle, independent in runs.pairs():
        yield from _tensors(oracle.step, oracle.after, independent.after)


OWN_BATCHES = "batches of the proof are what they must be"
TRAINER_BATCHES = "samples, tokens, labels and documents that the trainer reads"
RATES = "learning rates of the oracle and the trainer, in every step of the schedule"
FIRST_VALUES = "first values of all weights are the same bits"
ROUTES = "experts, drops and gates of every token"
BALANCE = "auxiliary and z-loss, biases and shares of loads"
LOSSES = "loss of each microbatch"
GRADIENTS = "every gradient before clipping"
TRANSFORMERS = "losses and gradients of transformers with the same weights"
NORMS = "gradient norm, learning rate and loss scale of every step"
DECAY = "the weights that decay"
UPDATES = "every clipped update"
PARAMETERS = "every parameter after every step"

COMPARISONS: Mapping[str, Callable[[TwoRuns], Iterator[Check]]] = {
    OWN_BATCHES: _own_batches,
    TRAINER_BATCHES: _trainer,
    RATES: _rates,
    FIRST_VALUES: _first_values,
    ROUTES: _routes,
    BALANCE: _balance,
    LOSSES: _losses,
    GRADIENTS: gradient_checks,
    TRANSFORMERS: _transformers,
    NORMS: _norms,
    DECAY: _decay_groups,
    UPDATES: _updates,
    PARAMETERS: _parameters,
}
"""What is compared, in the order in which one causes the next."""


def _tensors(
    step: int,
    found: Mapping[str, torch.Tensor],
    right: Mapping[str, torch.Tensor],
    *,
    backward: bool = False,
) -> Iterator[Check]:
    """Compare tensors by name; what is zero by mathematics is held to the size of all of them."""
    floor = FLOOR * norm_of({name: value.double() for name, value in right.items()})
    for position, name in enumerate(reversed(list(right)) if backward else right):
        error = relative_error(found[name], right[name], floor)
        yield Check(step, name, error, allowed=FLOAT64_TOLERANCE, position=position)


def _number(step: int, subject: str, found: float, right: float, position: int) -> Check:
    error = 0.0 if found == right else abs(found - right) / abs(right or 1.0)
    detail = f"{found:.10g} instead of {right:.10g}"
    allowed = FLOAT64_TOLERANCE
    return Check(step, subject, error, allowed=allowed, detail=detail, position=position)


def _wide(numbers: float | list[float]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def _error(found: torch.Tensor, right: torch.Tensor) -> float:
    if found.shape != right.shape:
        return float("inf")
    return relative_error(found, right, 0.0)
