# SPDX-License-Identifier: Apache-2.0
"""Wrong factors that have a name: a degree of the mesh, a count, a ratio of tokens, a sign."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from echelon.core.parameters import ParameterSpec
from echelon.core.plan import Plan
from echelon.layout.buckets import data_degree
from echelon.proof.causes.finding import ProofFinding
from echelon.proof.causes.token_ranks import tokens_by_context_rank
from echelon.proof.claims.plan_evidence import JudgedEvidence, PlanEvidence
from echelon.proof.evidence.evidence import CapturedEvidence
from echelon.proof.evidence.fits import nearly_equal
from echelon.proof.evidence.run import INITIAL, PARAMETERS, ReferenceStep
from echelon.proof.oracle.oracle import OracleStep
from echelon.schedule.from_plan import stage_placement_from_plan


@dataclass(frozen=True, slots=True)
class Factor:
    """Name a factor, its value in this plan, and the axis that it points to."""

    name: str
    value: float
    axis: str = ""


def _factors(degrees: Sequence[Factor], counts: Mapping[str, float]) -> list[Factor]:
    """Factors of these degrees and counts, most telling first."""
    found = [Factor("zero", 0.0), Factor("sign", -1.0)]
    for one in degrees:
        inverse = f"1/({one.name})" if " x " in one.name else f"1/{one.name}"
        found += [one, Factor(inverse, 1 / one.value, one.axis)]
    for name, value in {**counts, "2": 2.0}.items():
        if value != 1.0:
            found += [Factor(name, value), Factor(f"1/{name}", 1 / value)]
    # The root of four ranks or microbatches is 2, and "2" says more of a value twice as large.
    return [*found, *(Factor(f"sqrt({one.name})", one.value**0.5, one.axis) for one in degrees)]


def known_factors(plan: Plan, oracle: OracleStep, *, expert: bool = False) -> tuple[Factor, ...]:
    """Return the factors that parallel training is known to get wrong, most telling first.

    Those of routed experts are summed over ranks of their own.
    """
    mesh = plan.mesh
    own = {"edp": data_degree(plan, expert=True), "ep": mesh.ep} if expert else {}
    degrees = {
        **own,
        "dp": mesh.dp,
        "tp": mesh.tp,
        "pp": mesh.pp,
        "cp": mesh.cp,
        "microbatches": plan.num_microbatches,
    }
    found = _factors(
        [Factor(axis, degree, axis) for axis, degree in degrees.items() if degree > 1],
        {"tokens": oracle.tokens, "clip scale": oracle.clip_scale},
    )
    if mesh.dp > 1:
        for dp_rank, tokens in enumerate(tokens_of_replicas(oracle)):
            found += _token_ratios(f"dp {dp_rank}", "dp", mesh.dp, tokens / oracle.tokens)
    if mesh.cp > 1:
        for (dp_rank, cp_rank), tokens in tokens_by_context_rank(plan, oracle.step).items():
            whose = f"cp {cp_rank}" if mesh.dp == 1 else f"dp {dp_rank} cp {cp_rank}"
            axis = "cp" if mesh.dp == 1 else "dp and cp"
            found += _token_ratios(whose, axis, mesh.dp * mesh.cp, tokens / oracle.tokens)
    return tuple(found)


def _token_ratios(whose: str, axis: str, degree: int, share: float) -> list[Factor]:
    """Factors with the share of a rank in the tokens."""
    of = f"token ratio of {whose}"
    if not share:
        return [Factor(of, 0.0, axis)]
    return [
        Factor(of, share, axis),
        Factor(f"1/{of}", 1 / share, axis),
        Factor(f"1/({axis.replace(' and ', ' x ')} x {of})", 1 / (degree * share), axis),
    ]


def tokens_of_replicas(oracle: OracleStep) -> list[int]:
    """Return the valid tokens of each data-parallel rank."""
    totals: dict[int, int] = {}
    for (dp_rank, _), (_, count) in oracle.microbatch_losses.items():
        totals[dp_rank] = totals.get(dp_rank, 0) + count
    return [totals[dp_rank] for dp_rank in sorted(totals)]


def name_factor(value: float, known: Sequence[Factor], residual: float = 0.0) -> ProofFinding:
    """Return the finding that a thing is `value` times what it should be.

    Where several axes have that degree, all are named: the number alone cannot tell them apart.
    """
    same = [factor for factor in known if nearly_equal(factor.value, value)]
    if not same:
        return ProofFinding(
            "number", f"{value:.6g} times the right value", value=value, residual=residual
        )
    factor, axis = _name_and_axis(same)
    says = {"zero": "zero", "sign": "the right value with its sign turned"}.get(
        factor, f"{value:.6g} times the right value ({_names(same)})"
    )
    return ProofFinding(factor, says, axis, value=value, residual=residual)


def _names(same: Sequence[Factor]) -> str:
    return " = ".join(dict.fromkeys(factor.name for factor in same))


def _name_and_axis(same: Sequence[Factor]) -> tuple[str, str]:
    """Name of the first of equal factors, and all their axes."""
    axes = dict.fromkeys(factor.axis for factor in same if factor.axis)
    return same[0].name, " or ".join(axes)


def by_reach(
    evidence: JudgedEvidence,
    step: ReferenceStep,
    finding: ProofFinding,
    wrong: set[str],
    parameter: str,
) -> ProofFinding:
    """Name a factor of a gradient by the axes whose sums reach all that is wrong, and no more.

    Several axes may have the degree that a gradient is off by. Gradients between blocks are right,
    so the sums of gradients make it, and each axis sums other gradients.
    """
    value, named = finding.value or 0.0, (finding.factor, finding.axis)
    for known in _known_of(evidence, step, parameter):
        same = [factor for factor in known if nearly_equal(factor.value, value)]
        if not same or _name_and_axis(same) != named:
            continue
        shares = [_share_reached(evidence, wrong, factor) for factor in same]
        best = [factor for factor, share in zip(same, shares, strict=True) if share == max(shares)]
        excluded = dict.fromkeys(f.name for f in same if f.axis and f not in best)
        if excluded:
            says = f"{value:.6g} times the right value ({_names(best)}): {len(wrong)} of "
            says += f"{len(step.gradients)} gradients are wrong, and not as "
            says += f"{' or '.join(excluded)} would have them; gradients between blocks are right"
            factor, axis = _name_and_axis(best)
            return replace(finding, factor=factor, axis=axis, description=says)
    return finding


def _share_reached(evidence: JudgedEvidence, wrong: set[str], factor: Factor) -> float:
    """Share of the wrong gradients in those that are wrong, or that sums over an axis reach.

    Only units with a wrong gradient count: a sum may go wrong in some buckets alone.
    """
    if not wrong:
        return 0.0
    units = {_unit_of(name) for name in wrong}
    if isinstance(evidence, CapturedEvidence):
        near = [name for name in evidence.run.shapes if _unit_of(name) in units]
        axes, split = set(factor.axis.split(" and ")), evidence.run.split_axes
        reached = [[name for name in near if axes.issubset(split(name)[k])] for k in (0, 1)]
        reached = reached if factor.axis else [near]
    else:
        specs = [s for name, s in evidence.run.trained.items() if _unit_of(name) in units]
        stages = stage_placement_from_plan(evidence.plan)
        mirrored = any(len(stages.owners_of(s)) > 1 for s in range(evidence.plan.num_stages))
        all_units = {_unit_of(name) for name in evidence.run.trained}
        reached = [
            [s.name for s in some]
            for some in _reached(specs, factor.axis, units < all_units or mirrored)
        ]
    return max(len(wrong & {*some}) / len(wrong | {*some}) for some in reached)


def _unit_of(name: str) -> str:
    """Block of a parameter, by the first number in its name; else the first module."""
    block = re.match(r".*?\b\d+\b", name)
    return block[0] if block else name.partition(".")[0]


def _reached(
    specs: Sequence[ParameterSpec], axis: str, over_stages: bool
) -> Sequence[Sequence[ParameterSpec]]:
    """Sets of parameters of a plan whose gradients one sum over an axis may reach."""
    dense, experts = ([s for s in specs if (s.expert is None) == kind] for kind in (True, False))
    sets: dict[str, Sequence[Sequence[ParameterSpec]]] = {
        "tp": [
            [spec for spec in dense if spec.split_dim is None],
            [spec for spec in specs if spec.split_dim is not None],
        ],
        "edp": [experts],
        "ep": [experts],
        "dp": [dense, specs],
        "pp": [[spec for spec in dense if spec.layer is None], specs if over_stages else []],
    }
    return sets.get(axis, [specs, dense, experts])


def named_factor(
    evidence: JudgedEvidence,
    step: ReferenceStep,
    value: float,
    residual: float = 0.0,
    *,
    parameter: str = "",
    of: Literal["norm", "forward", ""] = "",
) -> ProofFinding:
    """The finding that a thing of a step is `value` times the right one.

    Of a "norm" the root of a degree comes first: squares were added up several times. Of a
    `parameter` of a program, axes along which one place alone holds it are named last: nothing is
    summed over them. A "forward" pass adds nothing up over data ranks or microbatches.
    """
    told = ProofFinding("number", "")
    for known in _known_of(evidence, step, parameter, of_forward=of == "forward"):
        if of == "norm":
            known.sort(key=lambda factor: not factor.name.startswith("sqrt"))
        # Where all is rough, a factor is what it is near to.
        near = [one.value for one in known if abs(one.value - value) <= evidence.explained]
        told = name_factor(float(near[0] if near else value), known, residual)
        if told.factor not in ("number", "2", "1/2"):
            break
    return told


def in_forward(known: Sequence[Factor]) -> list[Factor]:
    """The factors of axes that a forward pass adds something up over."""
    return [factor for factor in known if factor.axis in ("tp", "cp", "ep")]


def _known_of(
    evidence: JudgedEvidence, step: ReferenceStep, parameter: str, *, of_forward: bool = False
) -> Iterator[list[Factor]]:
    if isinstance(evidence, PlanEvidence):
        spec = evidence.run.specs.get(parameter)
        expert = spec is not None and spec.expert is not None
        known = list(known_factors(evidence.plan, evidence.steps[step.step], expert=expert))
        if of_forward:
            yield in_forward(known)
        yield known
        return
    mesh = evidence.mesh
    counts = {
        "microbatches": evidence.run.num_calls(step.step),
        "parts of the batch": len(step.parts) or 1,
        "clip scale": step.clip_scale,
    }
    held = {axis for axis in mesh.axes if _is_held_along(evidence, parameter, axis)}
    for axes in (held, set(mesh.axes)):
        degrees = [
            Factor(" x ".join(some), mesh.degree(some), " and ".join(some))
            for some in mesh.axis_sets()
            if axes.issuperset(some)
        ]
        yield _factors(degrees, counts)


def _is_held_along(evidence: CapturedEvidence, name: str, axis: str) -> bool:
    """Whether several places of an axis hold a parameter, or part of it."""
    holders = evidence.run.holders(PARAMETERS, INITIAL, name)
    return not name or len({evidence.mesh.coordinates(rank)[axis] for rank in holders}) > 1


def common_factor(fits: Sequence[tuple[float, float]], within: float) -> tuple[float, float] | None:
    """The factor that all fits (factor, residual) agree on, and the largest residual; None else."""
    if not fits or any(residual >= within for _, residual in fits):
        return None
    factors = [factor for factor, _ in fits]
    furthest = max(factors, key=lambda factor: abs(factor - 1.0))
    if max(factors) - min(factors) > within * max(1.0, abs(furthest)):
        return None
    return furthest, max(residual for _, residual in fits)


Sums = Iterable[tuple[float, float]]
"""Sums of the losses of some tokens, each with the number of these tokens."""


def mean_of_means(
    value: float, right: float, sums_of: Iterable[tuple[str, str, Sums]], fits: float
) -> Iterator[ProofFinding]:
    """Find a loss that is the mean of means: of whom, over which axis, and the sums of each."""
    for whose, axis, sums in sums_of:
        means = [total / tokens for total, tokens in sums if tokens]
        if len(means) > 1 and abs(value - fmean(means)) <= fits * abs(fmean(means)):
            says = f"a mean of the means of {whose}"
            yield ProofFinding("mean of means", says, axis, value=value / right)


def count_alike(weights: Sequence[float], tokens: Sequence[float], fits: float) -> bool:
    """Whether weights go as one over tokens, as in a mean of means."""
    products = [weight * count for weight, count in zip(weights, tokens, strict=True)]
    return all(products) and max(products) - min(products) <= fits * max(map(abs, products))
