"""`echelon prove`: run a plan beside one process, and say of every claim whether it holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from echelon.cli.flags import Json, RunFile, Settings
from echelon.cli.output import note, print_json, table

if TYPE_CHECKING:
    from echelon.prove.claims import ClaimResult
    from echelon.prove.proof import Proof

PROOF_FILE = "proof.json"


def prove(
    run: RunFile,
    /,
    *,
    settings: Settings = (),
    subject: Annotated[
        str | None,
        Parameter(show_default=False, help="Another engine: module:function on PYTHONPATH."),
    ] = None,
    json: Json = False,
) -> int:
    """Prove that a plan computes what one device computes; exit 1 where it does not.

    Of a run folder, the plan in it is proven, and proof.json is written beside it.
    """
    from echelon import api
    from echelon.cli.machine import require_memory_for_ranks
    from echelon.config.effects import require_trainable
    from echelon.config.load import load_job
    from echelon.observe.run_directory import RunDirectory

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
    proof = api.prove(plan, subject=subject)
    if is_run and not settings and subject is None:
        proof.write(folder.path / PROOF_FILE)
    if json:
        print_json("prove", {"proven": proof.proven, "proof": proof.to_json()})
        return 0 if proof.proven else 1
    print(proof_text(proof), end="")
    proof.require()
    return 0


def proof_text(proof: Proof) -> str:
    """Return the claims as a table, one column of errors for each precision.

    A claim that one precision has no use for (a master copy where nothing is rounded) has no entry
    there.
    """
    by_pass = [{claim.statement: claim for claim in one.claims} for one in proof.passes]
    every: dict[str, ClaimResult] = {}
    for claims in sorted(by_pass, key=len, reverse=True):
        every |= {text: claim for text, claim in claims.items() if text not in every}
    rows = [
        (
            statement,
            claim.compared,
            *(_outcome(claims[statement]) if statement in claims else "-" for claims in by_pass),
        )
        for statement, claim in every.items()
    ]
    model = proof.shrunk_plan.model
    head = (
        f"{proof.plan}: {proof.mesh} beside one process, {proof.num_steps} steps, "
        f"seed {proof.seed}; {model.layers} blocks x {model.hidden} wide stand for the model"
    )
    claims = table(("claim", "compared", *(one.precision for one in proof.passes)), rows)
    answer = "proven" if proof.proven else "NOT PROVEN"
    return f"{head}\n\n{claims}\n\n{answer}\n"


def _outcome(claim: ClaimResult) -> str:
    mark = "" if claim.holds else "  FAILS"
    note = f" ({claim.note})" if claim.note else ""
    if claim.allowed == 0:
        return (f"off by {claim.max_error:.1e}" if claim.max_error else "equal") + note + mark
    return f"{claim.max_error:.1e} of {claim.allowed:.1e}{note}{mark}"
