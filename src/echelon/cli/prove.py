"""`echelon prove`: run a plan beside one process, and say of every claim whether it holds."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from echelon.cli.flags import Json, RunFile, Settings
from echelon.cli.output import note, print_result, table

if TYPE_CHECKING:
    from echelon.proof.bisect.verdict import Bisection
    from echelon.proof.claims.claims import ClaimResult
    from echelon.proof.claims.proof import Proof

PROOF_FILE = "proof.json"


def prove(
    run: RunFile,
    /,
    *,
    settings: Settings = (),
    subject: Annotated[
        str | None, Parameter(help="Another engine: module:function on PYTHONPATH.")
    ] = None,
    bisect: Annotated[
        bool, Parameter(negative="", help="Where it fails, find the smallest run that fails so.")
    ] = False,
    independent: Annotated[
        bool, Parameter(negative="", help="Also hold the one process to other code.")
    ] = False,
    json: Json = False,
) -> int:
    """Prove that a plan computes what one device computes; exit 1 where it does not.

    Of a run folder, the plan in it is proven, and proof.json is written beside it.
    """
    from echelon.api.planning import bisect as bisect_plan
    from echelon.api.planning import prove as prove_plan
    from echelon.config.load import load_job
    from echelon.config.rules.plan import require_trainable
    from echelon.launch.host import require_memory_for_ranks
    from echelon.telemetry.run_directory import RunDirectory

    folder = RunDirectory(Path(run))
    is_run = folder.plan_file.is_file()
    if is_run and not settings:
        plan = folder.plan()
    else:
        job = load_job(folder.run_file if is_run else run, settings)
        plan = job.plan
        require_trainable(plan, job.sources)
    require_memory_for_ranks(plan.mesh.world_size)
    note(f"proving {plan.name} on {plan.mesh.world_size} ranks beside one process ...")
    proof = prove_plan(plan, subject=subject, independent=independent)
    if is_run and not settings and subject is None:
        proof.write(folder.path / PROOF_FILE)
    values: dict[str, object] = {"proven": proof.proven, "proof": proof.to_json()}
    text = proof_text(proof)
    if bisect and not proof.proven:
        note("looking for the smallest run that fails so ...")
        found = bisect_plan(plan, subject=subject)
        values["bisection"] = found and found.to_json()
        text += f"\n{bisection_text(found)}" if found else ""
    print_result("prove", lambda: values, lambda: text, as_json=json)
    if not json:
        proof.require()
    return 0 if proof.proven else 1


def proof_text(proof: Proof) -> str:
    """Return the claims as a table, one column of errors for each precision.

    A claim that one precision has no use for (a master copy where nothing is rounded) has no entry
    there.
    """
    by_pass = [{claim.statement: claim for claim in one.claims} for one in proof.passes]
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
    model = proof.shrunk_plan.model
    head = (
        f"{proof.plan}: {proof.mesh} beside one process, {proof.num_steps} steps, "
        f"seed {proof.seed}; {model.layers} blocks x {model.hidden} wide stand for the model"
    )
    claims = table(("claim", "compared", *(one.precision for one in proof.passes)), rows)
    answer = "proven" if proof.proven else "NOT PROVEN"
    return f"{head}\n\n{claims}\n\n{_independent_text(proof)}{answer}\n"


def _independent_text(proof: Proof) -> str:
    """Return how the one process fares beside the independent implementation, if it was asked."""
    if proof.independent is None:
        return ""
    rows = [(one.statement, one.compared, _outcome(one)) for one in proof.independent.claims]
    head = "the one process beside an independent implementation, in float64"
    return f"{head}\n\n{table(('comparison', 'compared', 'error'), rows)}\n\n"


def bisection_text(found: Bisection) -> str:
    """Return what a failure needs, what happens without each part of it, and the smallest run."""
    sizes = ", ".join(f"{name} {count}" for name, count in found.sizes.items())
    needed = [(one.name, one.without) for one in found.needed]
    spared = fill(
        f"it does not need: {', '.join(found.left_out) or 'nothing could be left out'}",
        width=100,
        subsequent_indent="  ",
    )
    return "\n\n".join(
        (
            f"the smallest run that breaks {found.rule} ({found.num_proofs} proofs): {sizes}\n"
            f"{found.summary}",
            table(("it needs", "without it"), needed) if needed else "it needs no setting",
            spared,
            *(f"# {name}\n{text}" for name, text in found.files.items()),
        )
    )


def _outcome(claim: ClaimResult) -> str:
    mark = "" if claim.holds else "  FAILS"
    note = f" ({claim.note})" if claim.note else ""
    if claim.allowed == 0:
        return (f"off by {claim.max_error:.1e}" if claim.max_error else "equal") + note + mark
    return f"{claim.max_error:.1e} of {claim.allowed:.1e}{note}{mark}"
