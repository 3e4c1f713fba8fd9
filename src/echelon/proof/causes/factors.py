# SPDX-License-Identifier: Apache-2.0
"""Wrong factors that have a name: a degree of the mesh, a count, a ratio of tokens, a sign."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.core.plan import Plan
from echelon.layout.buckets import data_degree
from echelon.proof.causes.context_parts import tokens_by_context_rank
from echelon.proof.causes.finding import ProofFinding
from echelon.proof.claims.factor_fit import nearly_equal
from echelon.proof.oracle.oracle import OracleStep


@dataclass(frozen=True, slots=True)
class Factor:
    """Name a factor, its value in this plan, and the axis that it points to."""

    name: str
    value: float
    axis: str = ""


def known_factors(plan: Plan, oracle: OracleStep, *, expert: bool = False) -> tuple[Factor, ...]:
    """Return the factors that parallel training is known to get wrong, most telling first.

    Those of routed experts are summed over ranks of their own.
    """
    mesh = plan.mesh
    own = {"edp": data_degree(plan, expert=True), "ep": mesh.ep} if expert else {}
    counts = {
        **own,
        "dp": mesh.dp,
        "tp": mesh.tp,
        "pp": mesh.pp,
        "cp": mesh.cp,
        "microbatches": plan.num_microbatches,
    }
    found = [Factor("zero", 0.0), Factor("sign", -1.0)]
    degrees = {axis: degree for axis, degree in counts.items() if degree > 1}
    for axis, degree in degrees.items():
        found += [Factor(axis, degree, axis), Factor(f"1/{axis}", 1 / degree, axis)]
    for name, value in {"tokens": oracle.tokens, "clip scale": oracle.clip_scale, "2": 2.0}.items():
        found += [Factor(name, value), Factor(f"1/{name}", 1 / value)]
    # Of four ranks or microbatches the root is 2: what is twice as large is told so.
    found += [Factor(f"sqrt({axis})", degree**0.5, axis) for axis, degree in degrees.items()]
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
    """Return the ways in which the share of a rank in the tokens gets into a factor."""
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
    axes = [factor.axis for factor in same if factor.axis]
    names = " = ".join(dict.fromkeys(factor.name for factor in same))
    says = {"zero": "zero", "sign": "the right value with its sign turned"}.get(
        same[0].name, f"{value:.6g} times the right value ({names})"
    )
    return ProofFinding(
        same[0].name, says, " or ".join(dict.fromkeys(axes)), value=value, residual=residual
    )


def named_factor(
    plan: Plan, oracle: OracleStep, value: float, residual: float = 0.0, *, of_norm: bool = False
) -> ProofFinding:
    """Return the finding that a thing of a step is `value` times what it should be.

    Of a norm the root of a degree tells most: squares were added up several times.
    """
    known = known_factors(plan, oracle)
    if of_norm:
        known = sorted(known, key=lambda factor: not factor.name.startswith("sqrt"))
    return name_factor(value, known, residual)
