# SPDX-License-Identifier: Apache-2.0
"""The words of `echelon prove`: claims as a table, beside what, and what a failure needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from echelon.cli.output import WIDEST
from echelon.planner.view.text_layout import fill_text, fit_page, table

if TYPE_CHECKING:
    from echelon.proof.bisect.verdict import Bisection
    from echelon.proof.claims.claims import ClaimResult
    from echelon.proof.verdict import Proof, ProofPass, SubjectProof


def proof_text(proof: Proof, *, columns: int = WIDEST) -> str:
    """Return the claims as a table, one column of errors for each precision.

    A claim that one precision has no use for (a master copy where nothing is rounded) has no entry
    there.
    """
    model = proof.shrunk_plan.model
    head = (
        f"{proof.plan}: {proof.mesh} beside one process, {proof.num_steps} steps, "
        f"seed {proof.seed}; {model.layers} blocks x {model.hidden} wide stand for the model"
    )
    answer = "proven" if proof.proven else "NOT PROVEN"
    beside = "".join(_beside_text(proof, columns))
    page = f"{head}\n\n{_claims_table(proof.passes, columns)}\n\n{beside}{answer}"
    return fit_page(page, columns=columns) + "\n"


def subject_text(proof: SubjectProof, *, columns: int = WIDEST) -> str:
    """Return the claims about a program that is not ours as a table."""
    head = (
        f"{proof.file}: {proof.mesh} beside one device, {proof.num_steps} steps, seed {proof.seed};"
        f" {proof.num_parameters} parameters of {proof.num_elements} elements, placement read from "
        f"{proof.framework}"
    )
    answer = "proven" if proof.proven else "NOT PROVEN"
    page = f"{head}\n\n{_claims_table(proof.passes, columns)}\n\n{answer}"
    return fit_page(page, columns=columns) + "\n"


def _claims_table(passes: Sequence[ProofPass], columns: int) -> str:
    by_pass = [{claim.statement: claim for claim in one.claims} for one in passes]
    longest_first = sorted(by_pass, key=len, reverse=True)
    every = dict.fromkeys(statement for claims in longest_first for statement in claims)
    rows = [
        (
            statement,
            max(claims[statement].compared for claims in by_pass if statement in claims),
            *(_outcome(claims[statement]) if statement in claims else "-" for claims in by_pass),
        )
        for statement in every
    ]
    return table(("claim", "compared", *(one.precision for one in passes)), rows, columns)


def _beside_text(proof: Proof, columns: int) -> Iterator[str]:
    """Yield how what is not the ranks' own step fares, as far as there was any."""
    for head, one in (
        ("the one process beside an independent implementation", proof.independent),
        ("a whole run of the trainer beside one process", proof.whole_run),
    ):
        if one is not None:
            note = f"{one.note}\n\n" if one.note else ""
            yield f"{head}\n\n{_claims_table([one], columns)}\n\n{note}"


def bisection_text(found: Bisection, *, columns: int = WIDEST) -> str:
    """Return what a failure needs, what happens without each part of it, and the smallest run."""
    sizes = ", ".join(f"{name} {count}" for name, count in found.sizes.items())
    needed = [(one.name, one.without) for one in found.needed]
    spared = fill_text(
        f"it does not need: {', '.join(found.left_out) or 'nothing could be left out'}",
        rest="  ",
        columns=columns,
    )
    head = (
        f"the smallest that breaks {found.rule} ({found.num_proofs} proofs): {sizes}\n"
        f"{found.summary}"
    )
    return "\n\n".join(
        (
            fit_page(head, columns=columns),
            table(("it needs", "without it"), needed, columns) if needed else "it needs no setting",
            spared,
            *(f"# {name}\n{_numbers_or_all(name, text)}" for name, text in found.files.items()),
        )
    )


def _numbers_or_all(file: str, text: str) -> str:
    """Return the numbers of a program, which are all that bisection changes, or the whole text."""
    from echelon.proof.bisect.program import numbers_of

    if not file.endswith(".py"):
        return text
    return "".join(f"{number.name}\n" for number in numbers_of(text))


def _outcome(claim: ClaimResult) -> str:
    mark = "" if claim.holds else "  FAILS"
    note = f" ({claim.note})" if claim.note else ""
    if claim.allowed == 0:
        return (f"off by {claim.max_error:.1e}" if claim.max_error else "equal") + note + mark
    return f"{claim.max_error:.1e} of {claim.allowed:.1e}{note}{mark}"
