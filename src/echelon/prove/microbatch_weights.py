"""A wrong gradient as a weighted sum of microbatches: the weights say what was done to them.

The right gradient is the sum of the parts of all microbatches of all replicas, each with weight 1.
A factor, a mean of means, a reduction left out, an accumulation dropped, or a stale buffer each
leave a pattern of weights that no other mistake leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from echelon.core.plan import Plan
from echelon.prove.diagnosis import Finding
from echelon.prove.factors import EXPLAINED, Factor, close, fit_basis, name_factor
from echelon.prove.oracle import OracleStep, Slot

Weights = Mapping[Slot, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Hold what an observed gradient is a sum of."""

    weights: Weights
    residual: float
    stale: float

    @property
    def right(self) -> bool:
        """Return whether this is the right gradient, but for rounding."""
        return _all_close(self.weights, 1.0) and close(self.stale, 0.0)


def unmix(
    observed: torch.Tensor, parts: Mapping[Slot, torch.Tensor], before: torch.Tensor | None
) -> Mixture | None:
    """Return the weights of microbatches (and of the step before) that make up `observed`.

    The coarsest basis that explains it is taken: replicas, then microbatches, then each by itself;
    None where nothing does.
    """
    for group in (_by_replica, _by_microbatch, _by_itself):
        keys = list(dict.fromkeys(group(slot) for slot in parts))
        sums = [sum_of([parts[s] for s in parts if group(s) == key]) for key in keys]
        basis = sums if before is None else [*sums, before]
        found, residual = fit_basis(observed, basis)
        if residual < EXPLAINED:
            by_key = dict(zip(keys, found, strict=False))
            weights = {slot: by_key[group(slot)] for slot in parts}
            return Mixture(
                weights=weights, residual=residual, stale=0.0 if before is None else found[-1]
            )
    return None


def sum_of(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of tensors."""
    return torch.stack(list(parts)).sum(0)


def read_weights(
    mixture: Mixture, plan: Plan, oracle: OracleStep, known: Sequence[Factor], dp_rank: int
) -> Finding | None:
    """Return what the weights say of a gradient that `dp_rank` holds; None for no known pattern."""
    weights = mixture.weights
    if not close(mixture.stale, 0.0):
        return _stale(mixture)
    if _all_close(weights, fmean(weights.values())):
        return name_factor(fmean(weights.values()), known, mixture.residual)
    for pattern in (
        _own_replica_only,
        _own_group_only,
        _some_zero,
        _mean_of_means,
        _one_microbatch,
        _groups,
    ):
        finding = pattern(weights, plan, oracle, known, dp_rank)
        if finding is not None:
            return Finding(
                factor=finding.factor,
                says=finding.says,
                axis=finding.axis,
                value=finding.value,
                residual=mixture.residual,
            )
    return None


def _by_replica(slot: Slot) -> Slot:
    return slot[0], 0


def _by_microbatch(slot: Slot) -> Slot:
    return 0, slot[1]


def _by_itself(slot: Slot) -> Slot:
    return slot


def _all_close(weights: Weights, value: float) -> bool:
    return all(close(weight, value) for weight in weights.values())


def _stale(mixture: Mixture) -> Finding:
    now, old = fmean(mixture.weights.values()), mixture.stale
    says = (
        f"{now:.4g} x this step's gradient + {old:.4g} x that of the step before (a stale buffer)"
    )
    return Finding(factor="stale", says=says, value=old, residual=mixture.residual)


_Pattern = Callable[[Weights, Plan, OracleStep, Sequence[Factor], int], Finding | None]


def _own_replica_only(
    weights: Weights, plan: Plan, oracle: OracleStep, known: Sequence[Factor], dp_rank: int
) -> Finding | None:
    own = {slot: w for slot, w in weights.items() if slot[0] == dp_rank}
    others = {slot: w for slot, w in weights.items() if slot[0] != dp_rank}
    if not others or not _all_close(others, 0.0) or _all_close(own, 0.0):
        return None
    scale = fmean(own.values())
    times = "" if close(scale, 1.0) else f" times {scale:.6g}"
    says = f"the part of dp {dp_rank} alone{times}: the sum over data-parallel ranks is missing"
    return Finding(factor="missing sum", says=says, axis="dp", value=scale)


def _own_group_only(
    weights: Weights, plan: Plan, oracle: OracleStep, known: Sequence[Factor], dp_rank: int
) -> Finding | None:
    """Find a sum over one of the two data axes only (hybrid sharding)."""
    shards = plan.mesh.dp_shard
    if shards == 1 or plan.mesh.dp_replicate == 1:
        return None
    for axis, place in (
        ("dp_replicate", lambda rank: rank // shards),
        ("dp_shard", lambda rank: rank % shards),
    ):
        own = {s: w for s, w in weights.items() if place(s[0]) == place(dp_rank)}
        others = {s: w for s, w in weights.items() if s not in own}
        if _all_close(others, 0.0) and _all_close(own, 1.0):
            ranks = sorted({replica for replica, _ in own})
            says = f"the parts of dp {ranks} alone: the sum over {axis} is missing"
            return Finding(factor="missing sum", says=says, axis=axis)
    return None


def _some_zero(
    weights: Weights, plan: Plan, oracle: OracleStep, known: Sequence[Factor], dp_rank: int
) -> Finding | None:
    """Name the microbatches that were lost, where the rest came through equally."""
    lost = [slot for slot, weight in weights.items() if close(weight, 0.0)]
    kept = {slot: weight for slot, weight in weights.items() if slot not in lost}
    if not lost or not kept or not _all_close(kept, fmean(kept.values())):
        return None
    numbers = sorted({microbatch for _, microbatch in lost})
    replicas = sorted({replica for replica, _ in lost})
    if len(numbers) < plan.num_microbatches and len(lost) == len(numbers) * plan.mesh.dp:
        says = f"microbatches {numbers} are lost: accumulation starts anew or stops early"
        return Finding(
            factor="microbatches lost", says=says, axis="microbatches", value=fmean(kept.values())
        )
    says = f"the parts of dp {replicas} are lost"
    return Finding(factor="replicas lost", says=says, axis="dp", value=fmean(kept.values()))


def _mean_of_means(
    weights: Weights, plan: Plan, oracle: OracleStep, known: Sequence[Factor], dp_rank: int
) -> Finding | None:
    """Find weights that go as one over the tokens of a microbatch, or of a replica."""
    counts = {slot: count for slot, (_, count) in oracle.microbatch_losses.items()}
    by_replica: dict[int, int] = {}
    by_microbatch: dict[int, int] = {}
    for (replica, microbatch), count in counts.items():
        by_replica[replica] = by_replica.get(replica, 0) + count
        by_microbatch[microbatch] = by_microbatch.get(microbatch, 0) + count
    rows = (
        ("microbatch of each replica", "dp or microbatches", counts),
        ("replica", "dp", {slot: by_replica[slot[0]] for slot in counts}),
        ("microbatch", "microbatches", {slot: by_microbatch[slot[1]] for slot in counts}),
    )
    for what, axis, tokens in rows:
        products = [weights[slot] * tokens[slot] for slot in weights]
        level = fmean(products)
        if all(close(product / level, 1.0) for product in products):
            says = f"a mean of means: each {what} counts alike, whatever its tokens"
            return Finding(factor="token ratio", says=says, axis=axis, value=level / oracle.tokens)
    return None


def _one_microbatch(
    weights: Weights, plan: Plan, oracle: OracleStep, known: Sequence[Factor], dp_rank: int
) -> Finding | None:
    """Find one microbatch (of every replica) that counts other than the rest, which count once."""
    for microbatch in range(plan.num_microbatches):
        odd = {slot: w for slot, w in weights.items() if slot[1] == microbatch}
        rest = {slot: w for slot, w in weights.items() if slot[1] != microbatch}
        scale = fmean(odd.values())
        if rest and _all_close(rest, 1.0) and _all_close(odd, scale):
            named = name_factor(scale, known)
            says = f"microbatch {microbatch} counts {named.says.replace(' the right value', '')}"
            return Finding(factor=named.factor, says=says, axis="microbatches", value=scale)
    return None


def _groups(
    weights: Weights, plan: Plan, oracle: OracleStep, known: Sequence[Factor], dp_rank: int
) -> Finding | None:
    """Tell weights that are one number per replica: each replica was scaled by its own factor."""
    by_replica = [
        {slot: w for slot, w in weights.items() if slot[0] == replica}
        for replica in range(plan.mesh.dp)
    ]
    levels = [fmean(own.values()) for own in by_replica]
    if all(_all_close(own, level) for own, level in zip(by_replica, levels, strict=True)):
        told = ", ".join(f"dp {replica} x {level:.4g}" for replica, level in enumerate(levels))
        return Finding(factor="replicas weighted", says=f"a sum with weights: {told}", axis="dp")
    return None
