# SPDX-License-Identifier: Apache-2.0
"""A wrong gradient as a weighted sum of microbatches: the weights say what was done to them.

The right gradient is the sum of the parts of all microbatches of all replicas, each with weight 1.
A factor, a mean of means, a reduction left out, an accumulation dropped, or a stale buffer each
leave a pattern of weights that no other mistake leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean

import torch

from echelon.core.parameters import ParameterSpec
from echelon.core.plan import Plan
from echelon.proof.causes.factors import Factor, count_alike, name_factor
from echelon.proof.causes.finding import ProofFinding
from echelon.proof.claims.plan_evidence import JudgedEvidence, PlanEvidence
from echelon.proof.evidence.fits import EXPLAINED, fit_basis, nearly_equal, relative_residual
from echelon.proof.evidence.run import HeldPart, ReferenceStep
from echelon.proof.oracle.oracle import MicrobatchKey, OracleStep, contributions
from echelon.proof.ranks import ObservedShard

Weights = Mapping[MicrobatchKey, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongGradient:
    """Hold one wrong gradient of any program, and the parts that are wrong, the largest first."""

    evidence: JudgedEvidence
    step: ReferenceStep
    name: str
    wrong: Sequence[HeldPart]

    @property
    def right(self) -> torch.Tensor:
        """The gradient of one device, clipped if the ranks' gradients were read clipped."""
        return self.evidence.wanted_gradient(self.step.step, self.name)

    @property
    def fits(self) -> float:
        """Residual below which an explanation fits."""
        return self.evidence.explained


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongGradientOfPlan(WrongGradient):
    """Hold one wrong gradient of a plan, and the factors that it is compared with."""

    evidence: PlanEvidence
    step: OracleStep
    wrong: Sequence[ObservedShard]
    known: Sequence[Factor]

    @property
    def spec(self) -> ParameterSpec:
        """Return the parameter that it is the gradient of."""
        return self.evidence.run.specs[self.name]

    def residual(self, gradient: torch.Tensor) -> float:
        """Return what a whole gradient leaves unexplained of the pieces that are wrong."""
        pieces = self.wrong
        return max(relative_residual(p.tensor.double(), gradient[p.region]) for p in pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchMixture:
    """Hold what an observed gradient is a sum of."""

    weights: Weights
    residual: float
    previous_step: float

    @property
    def right(self) -> bool:
        """Return whether this is the right gradient, but for rounding."""
        return _all_close(self.weights, 1.0) and nearly_equal(self.previous_step, 0.0)


_GROUPINGS: tuple[Callable[[MicrobatchKey], MicrobatchKey], ...] = (
    lambda slot: (slot[0], 0),
    lambda slot: (0, slot[1]),
    lambda slot: slot,
)
"""By replica, by microbatch, each by itself."""


def fit_microbatch_weights(
    observed: torch.Tensor, parts: Mapping[MicrobatchKey, torch.Tensor], before: torch.Tensor | None
) -> MicrobatchMixture | None:
    """Return the weights of microbatches (and of the step before) that make up `observed`.

    The coarsest basis that explains it is taken: replicas, then microbatches, then each by itself;
    None where nothing does.
    """
    for group in _GROUPINGS:
        keys = list(dict.fromkeys(group(slot) for slot in parts))
        sums = [sum_of([parts[s] for s in parts if group(s) == key]) for key in keys]
        found, residual = fit_basis(observed, sums if before is None else [*sums, before])
        if residual < EXPLAINED:
            by_key = dict(zip(keys, found, strict=False))
            return MicrobatchMixture(
                weights={slot: by_key[group(slot)] for slot in parts},
                residual=residual,
                previous_step=0.0 if before is None else found[-1],
            )
    return None


def sum_of(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of tensors."""
    return torch.stack(list(parts)).sum(0)


def replica_gradients(gradient: WrongGradientOfPlan, *names: str) -> list[torch.Tensor]:
    """Return the part of each data-parallel rank in the gradients of parameters."""
    parts = contributions(gradient.evidence.reference_plan, gradient.step)
    return [
        sum_of([part[name] for slot, part in parts.items() if slot[0] == dp_rank])
        for name, dp_rank in product(names, range(gradient.evidence.plan.mesh.dp))
    ]


def explain_weights(
    mixture: MicrobatchMixture, gradient: WrongGradientOfPlan, dp_rank: int | None
) -> ProofFinding | None:
    """Return what the weights say of a gradient that `dp_rank` holds; None for no known pattern.

    A parameter server, which holds gradients too, is no data rank.
    """
    found = next(filter(None, _patterns(mixture, gradient, dp_rank)), None)
    return found and replace(found, residual=mixture.residual)


def _patterns(
    mixture: MicrobatchMixture, gradient: WrongGradientOfPlan, dp_rank: int | None
) -> Iterator[ProofFinding | None]:
    plan, oracle, known = gradient.evidence.plan, gradient.step, gradient.known
    weights, old = mixture.weights, mixture.previous_step
    mean = fmean(weights.values())
    if not nearly_equal(old, 0.0):
        says = f"{mean:.4g} x this step's gradient + {old:.4g} x that of the step before"
        yield ProofFinding("stale", f"{says} (a stale buffer)", value=old)
    if _all_close(weights, mean):
        yield name_factor(mean, known)
    yield _own_replica_only(weights, dp_rank)
    yield _own_group_only(weights, plan, dp_rank)
    yield _some_zero(weights, plan)
    yield _mean_of_means(weights, oracle)
    yield _one_microbatch(weights, plan, known)
    yield _groups(weights, plan)


def _all_close(weights: Weights, value: float) -> bool:
    return all(nearly_equal(weight, value) for weight in weights.values())


def _own_replica_only(weights: Weights, dp_rank: int | None) -> ProofFinding | None:
    own = {slot: w for slot, w in weights.items() if slot[0] == dp_rank}
    others = {slot: w for slot, w in weights.items() if slot[0] != dp_rank}
    if not others or not _all_close(others, 0.0) or _all_close(own, 0.0):
        return None
    scale = fmean(own.values())
    times = "" if nearly_equal(scale, 1.0) else f" times {scale:.6g}"
    says = f"the part of dp {dp_rank} alone{times}: the sum over data-parallel ranks is missing"
    return ProofFinding("missing sum", says, "dp", value=scale)


def _own_group_only(weights: Weights, plan: Plan, dp_rank: int | None) -> ProofFinding | None:
    """Find a sum over one of the two data axes only (hybrid sharding)."""
    shards = plan.mesh.dp_shard
    if shards == 1 or plan.mesh.dp_replicate == 1 or dp_rank is None:
        return None
    places = ("dp_replicate", lambda rank: rank // shards), ("dp_shard", lambda rank: rank % shards)
    for axis, place in places:
        own = {s: w for s, w in weights.items() if place(s[0]) == place(dp_rank)}
        others = {s: w for s, w in weights.items() if s not in own}
        if _all_close(others, 0.0) and _all_close(own, 1.0):
            ranks = sorted({replica for replica, _ in own})
            says = f"the parts of dp {ranks} alone: the sum over {axis} is missing"
            return ProofFinding("missing sum", says, axis)
    return None


def _some_zero(weights: Weights, plan: Plan) -> ProofFinding | None:
    """Name the microbatches that were lost, where the rest came through equally."""
    lost = [slot for slot, weight in weights.items() if nearly_equal(weight, 0.0)]
    kept = {slot: weight for slot, weight in weights.items() if slot not in lost}
    if not lost or not kept or not _all_close(kept, fmean(kept.values())):
        return None
    level = fmean(kept.values())
    numbers = sorted({microbatch for _, microbatch in lost})
    if len(numbers) < plan.num_microbatches and len(lost) == len(numbers) * plan.mesh.dp:
        says = f"microbatches {numbers} are lost: accumulation starts anew or stops early"
        return ProofFinding("microbatches lost", says, "microbatches", value=level)
    says = f"the parts of dp {sorted({replica for replica, _ in lost})} are lost"
    return ProofFinding("replicas lost", says, "dp", value=level)


def _mean_of_means(weights: Weights, oracle: OracleStep) -> ProofFinding | None:
    """Find weights that go as one over the tokens of a microbatch, or of a replica."""
    counts = {slot: count for slot, (_, count) in oracle.microbatch_losses.items()}

    def together(place: int) -> Mapping[MicrobatchKey, int]:
        return {s: sum(n for o, n in counts.items() if o[place] == s[place]) for s in counts}

    rows = (
        ("microbatch of each replica", "dp or microbatches", counts),
        ("replica", "dp", together(0)),
        ("microbatch", "microbatches", together(1)),
    )
    for what, axis, tokens in rows:
        if count_alike(list(weights.values()), [tokens[slot] for slot in weights], EXPLAINED):
            level = fmean(weights[slot] * tokens[slot] for slot in weights)
            says = f"a mean of means: each {what} counts alike, whatever its tokens"
            return ProofFinding("mean of means", says, axis, value=level / oracle.tokens)
    return None


def _one_microbatch(weights: Weights, plan: Plan, known: Sequence[Factor]) -> ProofFinding | None:
    """Find one microbatch (of every replica) that counts other than the rest, which count once."""
    for microbatch in range(plan.num_microbatches):
        odd = {slot: w for slot, w in weights.items() if slot[1] == microbatch}
        rest = {slot: w for slot, w in weights.items() if slot[1] != microbatch}
        scale = fmean(odd.values())
        if rest and _all_close(rest, 1.0) and _all_close(odd, scale):
            named = name_factor(scale, known)
            times = named.description.replace(" the right value", "")
            says = f"microbatch {microbatch} counts {times}"
            return ProofFinding(named.factor, says, "microbatches", value=scale)
    return None


def _groups(weights: Weights, plan: Plan) -> ProofFinding | None:
    """Tell weights that are one number per replica: each replica was scaled by its own factor."""
    levels: list[float] = []
    for replica in range(plan.mesh.dp):
        own = {slot: w for slot, w in weights.items() if slot[0] == replica}
        levels.append(fmean(own.values()))
        if not _all_close(own, levels[-1]):
            return None
    told = ", ".join(f"dp {replica} x {level:.4g}" for replica, level in enumerate(levels))
    return ProofFinding("replicas weighted", f"a sum with weights: {told}", "dp")
