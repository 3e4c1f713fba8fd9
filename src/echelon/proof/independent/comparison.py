# SPDX-License-Identifier: Apache-2.0
"""The oracle against the independent implementation: claims, and a name of what differs first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from echelon.core.plan import Plan
from echelon.core.rulebook.prove import PROVE_INDEPENDENT
from echelon.proof.causes.finding import Diagnosis, ProofFinding
from echelon.proof.claims.checks import Check, exact_check, relative_error
from echelon.proof.claims.claims import ClaimResult, first_failure, judged
from echelon.proof.evidence.evidence import FLOAT64_TOLERANCE
from echelon.proof.evidence.fits import EXPLAINED, FLOOR, fit_factor
from echelon.proof.evidence.run import INITIAL
from echelon.proof.independent.hugging_face.beside import (
    class_beside,
    first_part_unlike_transformers,
    transformers_checks,
    why_not_beside,
)
from echelon.proof.independent.optimizers import decays, norm_of
from echelon.proof.independent.parts import LOSS, SAME, first_different_part, forward_from
from echelon.proof.independent.reading import (
    learning_rates,
    mixed_batches,
    proof_batches,
    trainer_batches,
)
from echelon.proof.independent.training import IndependentStep, run_independent
from echelon.proof.independent.weights import first_values, weights_of
from echelon.proof.oracle.batches import global_batch
from echelon.proof.oracle.oracle import (
    OracleStep,
    initial_parameters,
    router_loss_gradient,
    run_oracle,
)
from echelon.proof.subject import ProofBatch
from echelon.proof.verdict import ProofPass

INITIAL_VALUES = "initial values"
WEIGHT_DECAY = "weight decay"
LEARNING_RATE = "learning rate"
TIED_HEAD = "tied head"
AUXILIARY = "auxiliary loss"
BACKWARD = "backward pass"
UPDATE = "update of the optimizer"


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


def _trainer(runs: TwoRuns) -> Iterator[Check]:
    yield from trainer_batches(runs.plan, len(runs.batches))
    yield from mixed_batches(runs.plan, len(runs.batches))


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
    OWN_BATCHES: lambda runs: proof_batches(runs.plan, runs.batches),
    TRAINER_BATCHES: _trainer,
    RATES: lambda runs: learning_rates(runs.plan),
    FIRST_VALUES: _first_values,
    ROUTES: _routes,
    BALANCE: _balance,
    LOSSES: _losses,
    GRADIENTS: gradient_checks,
    TRANSFORMERS: lambda runs: transformers_checks(runs.plan, runs.oracle, runs.batches),
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


def independent_pass(plan: Plan, num_steps: int) -> ProofPass:
    """Compare the oracle of a shrunk float64 plan with the independent implementation."""
    runs = TwoRuns.of(plan, num_steps)
    claims = compare(runs)
    return ProofPass(
        precision="fp64",
        claims=claims,
        diagnosis=_diagnosis(runs, claims),
        note=why_not_beside(plan),
    )


def _diagnosis(runs: TwoRuns, claims: Sequence[ClaimResult]) -> Diagnosis | None:
    first = first_failure(claims)
    if first is None:
        return None
    claim, failure = first
    part, tensor, says = _named(runs, claim.statement, failure)
    finding = ProofFinding("", says, tensor=tensor, residual=failure.error)
    return Diagnosis.of(claim, failure, finding, part)


def _named(runs: TwoRuns, statement: str, failure: Check) -> tuple[str, str, str]:
    """Return the part at fault, the tensor (or unit, or number) that shows it, and what is seen."""
    subject, detail = failure.subject, failure.detail or f"off by {failure.error:.2g}"
    if statement in (OWN_BATCHES, TRAINER_BATCHES):
        whose = "the proof" if statement == OWN_BATCHES else "the trainer"
        return subject, f"batches of {whose}", detail
    if statement == BALANCE:
        part, _, unit = subject.rpartition(" of ")
        return part, unit, detail
    if statement == NORMS:
        return subject, f"step {failure.step}", detail
    if explain := _EXPLANATIONS.get(statement):
        return explain(runs, failure)
    return _PARTS[statement], subject, detail


def _of_forward(runs: TwoRuns, failure: Check) -> tuple[str, str, str]:
    step = failure.step
    found = first_different_part(runs.plan, runs.oracle[step], runs.batches[step])
    if found is None:
        return LOSS, failure.subject, failure.detail
    return found.part, found.unit, found.says


def _beside_transformers(runs: TwoRuns, failure: Check) -> tuple[str, str, str]:
    """Name what transformers computes otherwise than both implementations here."""
    step = failure.step
    found = first_part_unlike_transformers(runs.plan, runs.oracle[step], runs.batches[step])
    if found is None:
        return BACKWARD, failure.subject, f"off by {failure.error:.2g} beside transformers"
    return found.part, found.unit, found.says


def _of_gradient(runs: TwoRuns, failure: Check) -> tuple[str, str, str]:
    """Name a gradient that differs though every loss agrees."""
    oracle, name = runs.oracle[failure.step], failure.subject
    wrong = {
        one.subject
        for one in gradient_checks(runs)
        if one.step == failure.step and not one.error <= one.allowed
    }
    if runs.plan.model.tied and wrong == {"embedding.weight"}:
        return TIED_HEAD, name, f"off by {failure.error:.2g}; all other gradients agree"
    if runs.plan.model.experts is not None and _router_losses_differ(runs, oracle, wrong):
        return AUXILIARY, name, f"off by {failure.error:.2g} in what routers add to the loss"
    right = runs.independent[failure.step].gradients[name]
    factor, residual = fit_factor(oracle.gradients[name], right)
    times = f"{factor:.6g} times the right one" if residual < EXPLAINED else ""
    return BACKWARD, name, times or f"off by {failure.error:.2g}; every loss agrees"


def _router_losses_differ(runs: TwoRuns, oracle: OracleStep, wrong: set[str]) -> bool:
    """Return whether what routers add has another gradient in the weights of some router."""
    plan, step = runs.plan, oracle.step
    leaves = {name: value.detach().requires_grad_() for name, value in oracle.before.items()}
    passed = forward_from(plan, oracle, runs.batches[step], leaves)
    for name in sorted(name for name in wrong if name.endswith("router.weight")):
        found = router_loss_gradient(plan, oracle, name)
        if not passed.beside.requires_grad:
            return found is not None
        (right,) = torch.autograd.grad(passed.beside, leaves[name], retain_graph=True)
        if found is None or float((found - right).norm()) > SAME * float(right.norm()):
            return True
    return False


def _of_update(runs: TwoRuns, failure: Check) -> tuple[str, str, str]:
    """Name an update that differs though the gradients and the rate agree."""
    name, step = failure.subject, failure.step
    oracle, independent = runs.oracle[step], runs.independent[step]
    settings, right = runs.plan.mathematics.optimizer, independent.after[name]
    fact = weights_of(runs.plan.model)[name]
    part = oracle.updates[name]
    if settings.kind != "sgd" and decays(settings, fact):
        wanted = -independent.learning_rate * settings.weight_decay * independent.before[name]
        if float((part.decay - wanted).norm()) > SAME * float(wanted.norm()):
            factor, _ = fit_factor(part.decay, wanted)
            return WEIGHT_DECAY, name, f"it decays {factor:.6g} times as fast as it should"
    factor, residual = fit_factor(part.total, right - independent.before[name])
    times = f"{factor:.6g} times the right one" if residual < EXPLAINED else ""
    return UPDATE, name, times or f"off by {failure.error:.2g}; gradients and rate agree"


_PARTS = {RATES: LEARNING_RATE, FIRST_VALUES: INITIAL_VALUES, DECAY: WEIGHT_DECAY}
"""The part that a comparison is about, where it is about one."""

_EXPLANATIONS: Mapping[str, Callable[[TwoRuns, Check], tuple[str, str, str]]] = {
    ROUTES: _of_forward,
    LOSSES: _of_forward,
    GRADIENTS: _of_gradient,
    TRANSFORMERS: _beside_transformers,
    UPDATES: _of_update,
    PARAMETERS: _of_update,
}
"""What names a difference, by the comparison that shows it."""
