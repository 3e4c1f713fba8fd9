# SPDX-License-Identifier: Apache-2.0
"""What a wrong update looks like: a wrong rate, decay or clip, a slice done twice or not at all.

Where slices are updated by different ranks, only what the wrong ranks updated is looked at. State
that rests in slices, buffers and files can be read too early, written too late, or read from
another place: the formula is run again with the value or a running sum as they were some updates
ago, or as those of another tensor of the same shape are. Then what is wrong between a master copy,
its update, and the parameter that is rounded from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.choices.registry import load_reference
from echelon.core.plan import Optimizer, Plan
from echelon.cost.bytes.servers import SERVERS_AXIS
from echelon.layout.stage import decays, update_rule_of
from echelon.proof.causes.factors import named_factor
from echelon.proof.causes.finding import (
    ROUNDING,
    ProofFinding,
    most_telling,
    no_cause,
    spread,
    with_distinguishing_axis,
)
from echelon.proof.causes.gradients.norm import name_norm
from echelon.proof.causes.places import describe_slice, told_by_slice, wrong_elements
from echelon.proof.causes.updates.optimizer_constants import (
    ReplayedUpdate,
    explain_constants,
    explain_state,
    other_count,
    wrong_ranks,
)
from echelon.proof.claims import value_checks
from echelon.proof.claims.checks import Check
from echelon.proof.claims.plan_evidence import JudgedEvidence, PlanEvidence
from echelon.proof.claims.value_checks import replay
from echelon.proof.evidence.evidence import CapturedEvidence
from echelon.proof.evidence.fits import (
    EXPLAINED,
    fit_basis,
    fit_factor,
    nearly_equal,
    relative_residual,
)
from echelon.proof.evidence.run import INITIAL, PARAMETERS, ReferenceStep
from echelon.proof.oracle.optimizers import OptimizerState, TensorUpdate, update
from echelon.proof.oracle.oracle import TORCH_DTYPES, OracleStep

_EXACT = 1e-9  # relative difference

_OF_SLICES = ("none", "stale", "another's state")
"""What is told with the slice that it is limited to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongUpdate:
    """Hold one wrong update of any program: its wrong elements, and the values added to them."""

    evidence: JudgedEvidence
    step: ReferenceStep
    name: str
    where: torch.Tensor
    seen: torch.Tensor

    def there(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the elements of a whole tensor that are wrong, float64."""
        return whole[self.where].double()

    @property
    def main(self) -> torch.Tensor:
        """Return the right part of the gradients."""
        return self.there(self.step.parts_of_update(self.name)[0])

    @property
    def decay(self) -> torch.Tensor:
        """Return the right part of the weight decay."""
        return self.there(self.step.parts_of_update(self.name)[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongUpdateOfPlan(WrongUpdate):
    """Hold one wrong update of a plan, whose formula can be run again."""

    evidence: PlanEvidence
    step: OracleStep

    @property
    def optimizer(self) -> Optimizer:
        """Return what is to be done."""
        return self.evidence.plan.mathematics.optimizer

    @property
    def odd(self) -> torch.Tensor:
        """Return which elements are wrong by themselves."""
        evidence, step = self.evidence, self.step.step
        allowed = evidence.tolerance.allowed("updates", step, self.name)
        seen = evidence.run.update(step, self.name)
        return wrong_elements(seen, self.step.updates[self.name].total, allowed)

    def replayed(self, name: str, where: torch.Tensor) -> ReplayedUpdate:
        """Return what the formula can be run again with, for this tensor or one of its shape."""
        evidence, step = self.evidence, self.step.step
        return ReplayedUpdate(
            spec=evidence.run.specs[name],
            optimizer=self.optimizer,
            steps=tuple(evidence.steps[: step + 1]),
            where=where,
            seen=evidence.run.update(step, self.name)[where],
        )


def explain_update(evidence: JudgedEvidence, failure: Check) -> ProofFinding:
    """Explain a wrong update of any program, its gradient being right."""
    if isinstance(evidence, CapturedEvidence):
        return _update_of_program(evidence, failure)
    oracle, name = evidence.steps[failure.step], failure.subject
    if oracle.skipped:
        return ProofFinding("not skipped", "updated in a step whose gradients overflowed")
    wrong, ranks, _ = _wrong_update(evidence, oracle, name)
    finding = _cause_of(wrong)
    if finding.factor in _OF_SLICES and isinstance(wrong, WrongUpdateOfPlan):
        finding = told_by_slice(finding, describe_slice(wrong.odd))
    # Other tensors of the step count too: all of this one may lie in the slice of one rank.
    every = {r for other in oracle.updates for r in _wrong_places(evidence, oracle, other)[1]}
    finding = replace(finding, ranks=tuple(sorted(ranks)))
    return _told_of(evidence, finding, every, name)


def _update_of_program(evidence: CapturedEvidence, failure: Check) -> ProofFinding:
    """Explain the update of the first rank that has it wrong."""
    wrong, ranks, holders = _wrong_update(
        evidence, evidence.steps[failure.step], failure.subject, failure.allowed
    )
    finding = replace(_cause_of(wrong), ranks=tuple(sorted(ranks)))
    return with_distinguishing_axis(evidence.axes(), finding, ranks, holders)


def _wrong_update(
    evidence: JudgedEvidence, step: ReferenceStep, name: str, allowed: float = 0.0
) -> tuple[WrongUpdate, set[int], set[int]]:
    """A wrong update, the ranks that have it wrong, and all that have it; of a program one's."""
    run = evidence.run
    if isinstance(evidence, PlanEvidence):
        oracle = evidence.steps[step.step]
        where, ranks = _wrong_places(evidence, oracle, name)
        where = where if ranks else torch.ones_like(where)
        seen = run.update(step.step, name)[where]
        wrong = WrongUpdateOfPlan(evidence=evidence, step=oracle, name=name, where=where, seen=seen)
        return wrong, ranks, set()
    right = step.update(name)
    before = step.step - 1 if step.step else INITIAL
    added = {
        rank: value - run.vector(PARAMETERS, before, name, rank)
        for rank, value in run.vectors(PARAMETERS, step.step, name).items()
    }
    limit = max(allowed, evidence.explained) * float(right.norm()) / 2
    odd = wrong_ranks(added, right.reshape(-1), limit) or list(added)
    first = added[odd[0]]
    where = ~first.isnan().view(right.shape)
    seen = first[~first.isnan()]
    wrong = WrongUpdate(evidence=evidence, step=step, name=name, where=where, seen=seen)
    return wrong, set(odd), set(added)


def _cause_of(wrong: WrongUpdate) -> ProofFinding:
    """The cause that explains most wrong updates of the step."""
    finding = most_telling(_causes(wrong), partial(_causes_elsewhere, wrong))
    return finding or ProofFinding("none", no_cause(_excluded(wrong)))


def _causes(wrong: WrongUpdate) -> Iterator[ProofFinding]:
    if isinstance(wrong, WrongUpdateOfPlan):
        yield from stale_versions(wrong.evidence, wrong.step, wrong.name)
    yield from _findings(wrong)


def _causes_elsewhere(wrong: WrongUpdate) -> Iterator[tuple[str, Iterator[ProofFinding]]]:
    """Yield other wrong updates of the step, each with the causes that fit it."""
    evidence, step = wrong.evidence, wrong.step
    checks = value_checks.updates(replace(evidence, steps=[step]))
    names = [c.subject for c in checks if c.subject != wrong.name and not c.error <= c.allowed]
    for name in spread(names):
        if evidence.run.parts(evidence.run.values_kind, step.step, name):
            yield name, _causes(_wrong_update(evidence, step, name)[0])


def _excluded(wrong: WrongUpdate) -> Mapping[str, float]:
    """The causes tried on an update, each with the share that it leaves unexplained."""
    seen, main, decay = wrong.seen, wrong.main, wrong.decay
    value = wrong.there(wrong.step.before[wrong.name])
    left = {
        "a factor": fit_factor(seen, main + decay)[1],
        "another rate or decay": fit_basis(seen, (main, value))[1],
    }
    if not isinstance(wrong, WrongUpdateOfPlan):
        left["another size"] = relative_residual(seen.sign(), (main + decay).sign())
    elif not wrong.step.step:
        left["another scale of the gradient"] = _scale_behind(wrong)[1]
    return {cause: share for cause, share in left.items() if math.isfinite(share)}


def _told_of(
    evidence: PlanEvidence, finding: ProofFinding, ranks: set[int], name: str = ""
) -> ProofFinding:
    """Return the finding with the axis that tells `ranks` from all others."""
    mesh = evidence.plan.mesh
    everyone = mesh.server_ranks or range(mesh.world_size)  # those that update
    return with_distinguishing_axis(evidence.axes(name), finding, ranks, everyone)


def _wrong_places(
    evidence: PlanEvidence, oracle: OracleStep, name: str
) -> tuple[torch.Tensor, set[int]]:
    """Find where an update is wrong, and the ranks there: who has a gradient updates with it."""
    right = oracle.updates[name].total.double()
    seen = evidence.run.update(oracle.step, name)
    allowed = evidence.tolerance.allowed("updates", oracle.step, name) * float(right.norm())
    where = torch.zeros(right.shape, dtype=torch.bool)
    ranks: set[int] = set()
    for piece in evidence.run.parts("gradients", oracle.step, name):
        if not float((seen[piece.region] - right[piece.region]).norm()) <= allowed / 2:
            where[piece.region] = True
            ranks.add(piece.rank)
    return where, ranks


def _findings(wrong: WrongUpdate) -> Iterator[ProofFinding]:
    if not bool(wrong.seen.isfinite().all()):
        yield ProofFinding("not finite", "not finite")
        return
    if not float(wrong.seen.norm()):
        yield ProofFinding("zero", "not updated at all", value=0.0)
    if isinstance(wrong, WrongUpdateOfPlan):
        yield from _clip_epsilon(wrong)
        yield from _repeated(wrong)
    known = [*_rate_and_decay(wrong)]
    yield from known
    if isinstance(wrong, WrongUpdateOfPlan):
        # An epsilon and a scale of the gradient look alike in a first update: a named scale first.
        yield from _clip(wrong)
        yield from _scaled_gradient(wrong, by_axis=True)
        yield from explain_constants(wrong.replayed(wrong.name, wrong.where))
        yield from _scaled_gradient(wrong, by_axis=False)
        yield from _other_state(wrong)
        return
    first, without_decay = wrong.evidence.steps[0], wrong.seen - wrong.decay
    counts = [*other_count(first, wrong.step, wrong.name, without_decay, wrong.where)]
    yield from counts
    right = wrong.main + wrong.decay
    alike = relative_residual(wrong.seen.sign(), right.sign()) < wrong.evidence.explained
    if alike and not known and not counts:
        says = "of the right sign and another size: another epsilon, beta, or count of steps"
        yield ProofFinding("other size", says)


def _rate_and_decay(wrong: WrongUpdate) -> Iterator[ProofFinding]:
    """Find other weights of what the gradients add, and of what the decay does."""
    main, decay, value = wrong.main, wrong.decay, wrong.there(wrong.step.before[wrong.name])
    rate, due = _constants(wrong)
    fits = wrong.evidence.explained
    shrunk = decay / due if due else -rate * value
    factor, alone = fit_factor(wrong.seen, main + decay)
    times = _times(wrong, factor, due, alone) if alone < fits else None
    weights, residual = fit_basis(wrong.seen, (main, shrunk))
    # Where the value is parallel to the update, any factor is a decay, too: a named factor first.
    named = times is not None and times.factor not in ("none", "number")
    if named or not rate or residual >= fits or not float(shrunk.norm()):
        if times is not None:
            yield times
        return
    own, found = weights[0], weights[1] if abs(weights[1]) > fits else 0.0
    if abs(found - own * due) < fits * max(1.0, abs(own)):
        yield _times(wrong, own, due, residual)
    elif abs(own - 1) < fits and due:
        says = f"weight decay is {found:.4g} instead of {due:.4g}"
        yield ProofFinding("weight decay", says, value=found, residual=residual)
    elif abs(own - 1) < fits:
        says = f"weight decay of {found:.4g} where none belongs"
        if isinstance(wrong, WrongUpdateOfPlan):
            shape = wrong.evidence.run.specs[wrong.name].shape
            says += f": it is {'a matrix of no block' if len(shape) > 1 else 'a norm or bias'}"
        yield ProofFinding("undue decay", says, value=found, residual=residual)
    elif abs(found - due) < fits and (scale := _muon_scale(wrong, own)):
        yield scale
    else:
        says = f"{own:.6g} times the right update, with a decay of {found:.4g} instead of {due:.4g}"
        yield ProofFinding("rate and decay", says, value=own, residual=residual)


def _constants(wrong: WrongUpdate) -> tuple[float, float]:
    """Learning rate and weight decay of one device; a parameter may take no decay."""
    if not isinstance(wrong, WrongUpdateOfPlan):
        return wrong.step.rates.get(wrong.name, (0.0, 0.0))
    decays_it = decays(wrong.optimizer, wrong.evidence.run.specs[wrong.name])
    return wrong.step.learning_rate, wrong.optimizer.weight_decay * decays_it


def _times(wrong: WrongUpdate, factor: float, due: float, residual: float) -> ProofFinding:
    """Name an update that is the right one, times a factor."""
    if abs(factor - 1) < wrong.evidence.explained:
        return ProofFinding("none", ROUNDING, residual=residual)
    if not due and (scale := _muon_scale(wrong, factor)):
        return scale
    if (schedule := _rate_of_another_step(wrong, factor)) is not None:
        return replace(schedule, residual=residual)
    told = named_factor(wrong.evidence, wrong.step, factor, residual)
    says = f"{factor:.6g} times the right update: another learning rate, or it is made again"
    if told.factor != "number":
        says += f" ({told.factor})"
    return replace(told, description=says)


def _rate_of_another_step(wrong: WrongUpdate, factor: float) -> ProofFinding | None:
    """Find the learning rate of another step of the program's schedule."""
    if isinstance(wrong, WrongUpdateOfPlan):
        return None
    own = wrong.step.rates.get(wrong.name, (0.0, 0.0))[0]
    for other in wrong.evidence.steps:
        rate = other.rates.get(wrong.name, (0.0, 0.0))[0]
        if rate != own and own and nearly_equal(factor, rate / own):
            says = f"made with the learning rate of step {other.step} ({rate:.4g} instead of "
            says += f"{own:.4g}): the schedule is at another step"
            return ProofFinding("rate of another step", says, value=factor)
    return None


def _other_state(wrong: WrongUpdateOfPlan) -> Iterator[ProofFinding]:
    """Find another state behind the elements that are wrong, be they few."""
    specs, name, odd = wrong.evidence.run.specs, wrong.name, wrong.odd
    rule, shape = update_rule_of(wrong.optimizer, specs[name]), specs[name].shape
    others = [
        wrong.replayed(other, odd)
        for other, spec in specs.items()
        if other != name and spec.shape == shape and update_rule_of(wrong.optimizer, spec) == rule
    ]
    yield from explain_state(wrong.replayed(name, odd), others)


def _repeated(wrong: WrongUpdateOfPlan) -> Iterator[ProofFinding]:
    """Find the optimizer run twice on one slice, counting the second time as a step or not."""
    oracle = wrong.step
    for counts in (True, False):
        state = OptimizerState()
        for before in wrong.evidence.steps[: oracle.step]:
            if not before.skipped:
                _update(wrong, before, before.before[wrong.name], state)
        value = oracle.before[wrong.name]
        first = _update(wrong, oracle, value, state)
        if not counts:
            state.num_updates -= 1
        second = _update(wrong, oracle, value + first.total, state)
        twice = (first.total + second.total)[wrong.where].double()
        residual = relative_residual(wrong.seen, twice)
        if residual < EXPLAINED:
            yield ProofFinding("twice", "updated twice in one step", value=2.0, residual=residual)
            return


def _update(
    wrong: WrongUpdateOfPlan, oracle: OracleStep, value: torch.Tensor, state: OptimizerState
) -> TensorUpdate:
    spec = wrong.evidence.run.specs[wrong.name]
    gradient = oracle.gradients[wrong.name].to(value.dtype) * oracle.clip_scale
    return update(spec, value, gradient, state, wrong.optimizer, oracle.learning_rate)


def _muon_scale(wrong: WrongUpdate, factor: float) -> ProofFinding | None:
    if not isinstance(wrong, WrongUpdateOfPlan):
        return None
    replayed = wrong.replayed(wrong.name, wrong.where)
    return explain_muon_scale(replayed, wrong.evidence.plan, factor)


def _clip_epsilon(wrong: WrongUpdateOfPlan) -> Iterator[ProofFinding]:
    """Know torch's own clipping, which divides by the norm + 1e-6, from rounding."""
    right, clip_norm = wrong.step.clip_scale, wrong.optimizer.clip_norm
    scale, residual = _scale_behind(wrong)
    if clip_norm is None or residual > _EXACT:
        return
    padded = clip_norm / (wrong.step.grad_norm + 1e-6)
    if abs(scale / padded - 1) <= _EXACT <= abs(scale / right - 1):
        says = "clipped by the norm + 1e-6, as torch.nn.utils.clip_grad_norm_ does"
        yield ProofFinding("clip epsilon", says, value=scale / right)


def _clip(wrong: WrongUpdateOfPlan) -> Iterator[ProofFinding]:
    """Name the scale of the gradient behind the first update, if it is that of a wrong clip."""
    evidence, oracle, clip_norm = wrong.evidence, wrong.step, wrong.optimizer.clip_norm
    scale, residual = _scale_behind(wrong)
    # The inverse magnifies rounding where the share is near 1.
    if residual > 1e3 * EXPLAINED or not scale:
        return
    if nearly_equal(scale, 1.0):
        yield ProofFinding("clip", "the gradient was not clipped", value=1.0)
    elif clip_norm is not None and (named := name_norm(evidence, oracle, clip_norm / scale)):
        yield replace(named, description=f"clipped by a wrong norm: {named.description}")


def _scaled_gradient(wrong: WrongUpdateOfPlan, *, by_axis: bool) -> Iterator[ProofFinding]:
    """Tell the scale of the gradient behind the first update, of an axis or without a name."""
    evidence, oracle = wrong.evidence, wrong.step
    scale, residual = _scale_behind(wrong)
    if residual > 1e3 * EXPLAINED or not scale:
        return
    ratio = scale / oracle.clip_scale
    named = named_factor(evidence, oracle, ratio)
    if by_axis != bool(named.axis):
        return
    says = f"the update is that of a gradient {ratio:.6g} times the clipped one"
    if by_axis:
        says += f" ({named.factor}); an epsilon {1 / ratio:.4g} times as large would make it, too"
    yield replace(named, description=says)


def gradient_behind_adamw(step: torch.Tensor, optimizer: Optimizer) -> torch.Tensor:
    """Return the gradient behind a first update of AdamW by -lr x `step`, without its decay.

    Both moments are the gradient's own: step = g / (|g| + eps), so |g| = eps |step| / (1 - |step|).
    """
    return optimizer.eps * step / (1 - step.abs())


def _scale_behind(wrong: WrongUpdateOfPlan) -> tuple[float, float]:
    """Invert a first update to the gradient behind it; return its scale and residual.

    Later steps cannot be inverted, nor those of some optimizers: their residual is infinite.
    """
    oracle, spec = wrong.step, wrong.evidence.run.specs[wrong.name]
    inverse = OPTIMIZERS[update_rule_of(wrong.optimizer, spec)].gradient_behind
    if oracle.step or not inverse:
        return 0.0, float("inf")
    steps = -(wrong.seen - wrong.decay) / oracle.learning_rate
    gradient = load_reference(inverse)(steps, wrong.optimizer)
    return fit_factor(gradient, oracle.gradients[wrong.name][wrong.where])


_ROUGHLY = 1e-2  # relative difference


def explain_written_back(evidence: PlanEvidence, failure: Check) -> ProofFinding:
    """Return why a parameter is not the rounding of its master copy, and whose slice it is."""
    step, name = failure.step, failure.subject
    held, where, owners = _not_written(evidence, step, name)
    finding = ProofFinding("none", "not the rounding of its master copy", ranks=owners)
    if step != INITIAL:
        before = _rounded(evidence, step - 1 if step else INITIAL, name)
        if torch.equal(held[where], before[where]):
            says = "the rounding of its master copy before the update: not written back"
            finding = ProofFinding("stale", says, ranks=owners)
    # Other tensors of the step count too: all of this one may lie in the slice of one rank.
    names = evidence.run.specs
    return _told_of(
        evidence, finding, {r for one in names for r in _not_written(evidence, step, one)[2]}
    )


def _rounded(evidence: PlanEvidence, step: int, name: str) -> torch.Tensor:
    dtype = TORCH_DTYPES[evidence.plan.mathematics.precision.parameters]
    return evidence.run.whole("masters", step, name).to(dtype)


def _not_written(
    evidence: PlanEvidence, step: int, name: str
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Return a parameter as ranks hold it, where it is wrong, and who updates it there."""
    observed, right = evidence.run, _rounded(evidence, step, name)
    where = torch.zeros(right.shape, dtype=torch.bool)
    held = right.clone()
    for piece in observed.parts("parameters", step, name):
        if observed.fits(piece):
            odd = piece.tensor != right[piece.region]
            where[piece.region] |= odd
            held[piece.region] = torch.where(odd, piece.tensor, held[piece.region])
    copies = observed.parts("masters", step, name)
    return held, where, tuple(sorted({p.rank for p in copies if bool(where[p.region].any())}))


def explain_replayed(evidence: PlanEvidence, failure: Check) -> ProofFinding:
    """Return how an update differs from what the formula makes of the ranks' own gradients."""
    right = replay(evidence, torch.float64)[failure.step][failure.subject]
    seen = evidence.run.update(failure.step, failure.subject)
    factor, residual = fit_factor(seen, right)
    if residual < _ROUGHLY and abs(factor - 1) > residual and not nearly_equal(factor, 1.0):
        says = f"{factor:.4g} times what the formula makes of the gradients"
        return ProofFinding("number", says, value=factor, residual=residual)
    says = "not what the formula makes of the gradients that the ranks hold"
    return ProofFinding("none", says, residual=residual)


def explain_muon_scale(replayed: ReplayedUpdate, plan: Plan, factor: float) -> ProofFinding | None:
    """Return that an orthogonal update has the scale of a tensor-parallel slice, where it has."""
    spec, tp = replayed.spec, plan.mesh.tp
    if update_rule_of(replayed.optimizer, spec) != "muon" or spec.split_dim is None or tp == 1:
        return None
    local = spec.local_shape(tp)
    if nearly_equal(factor, 1.0) or not nearly_equal(factor**2, max(local) / max(spec.shape)):
        return None
    here, whole = ("x".join(map(str, shape)) for shape in (local, spec.shape))
    says = f"scaled by the longer side of the slice, {here}, instead of the matrix, {whole}"
    return ProofFinding("local scale", says, "tp", value=factor)


def stale_versions(evidence: PlanEvidence, oracle: OracleStep, name: str) -> Iterator[ProofFinding]:
    """Find values that servers have updated, while workers still have those before the update."""
    mesh, observed = evidence.plan.mesh, evidence.run
    if not mesh.servers:
        return
    before = oracle.before[name].double()
    right = before + oracle.updates[name].total.double()
    of_workers = observed.whole("parameters", oracle.step, name)
    wrong: set[int] = set()
    for piece in observed.parts("parameters", oracle.step, name):
        if not mesh.is_server(piece.rank):
            continue
        moved = float((right[piece.region] - before[piece.region]).norm())
        late = of_workers[piece.region] - before[piece.region]
        updated = relative_residual(piece.tensor.double(), right[piece.region]) < EXPLAINED
        if moved and updated and float(late.norm()) < EXPLAINED * moved:
            wrong.add(mesh.server_ranks.index(piece.rank))
    if wrong:
        says = (
            f"server {' and '.join(map(str, sorted(wrong)))} has updated it, and workers go on "
            "with the version before: a stale version is taken for the new one"
        )
        yield ProofFinding("stale", says, SERVERS_AXIS)
