# SPDX-License-Identifier: Apache-2.0
"""`echelon prove`: a plan beside one process, and a table of claims that hold or fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from echelon.cli.flags import REPORT, Json, ReportNames, Settings, WrittenFiles, bad_argument
from echelon.cli.output import WIDEST, note, page_columns, print_result, working
from echelon.page.documents.proof import claims_sections, proof_page
from echelon.planner.view.text_layout import fill_text, fit_page, section_text, table

if TYPE_CHECKING:
    from echelon.proof.bisect.verdict import Bisection
    from echelon.proof.verdict import Proof, SubjectProof

PROOF_FILE = "proof.json"


def prove(
    run: Annotated[
        str | None,
        Parameter(help="A run.toml, or the name of a preset such as nano; none for a program."),
    ] = None,
    /,
    *,
    settings: Settings = (),
    subject: Annotated[
        str | None,
        Parameter(
            help="Another engine (module:function on PYTHONPATH), or any program: a file with "
            "one_device and on_rank, or FILE:function for another function than on_rank."
        ),
    ] = None,
    module: Annotated[
        str | None,
        Parameter(
            help="FILE:FUNCTION that returns a module of your own, its batches and its loss: the "
            "mesh, ZeRO, precision and optimizer are those of the run."
        ),
    ] = None,
    ranks: Annotated[
        int | None, Parameter(help="Number of ranks of a program, where its MESH does not say.")
    ] = None,
    bisect: Annotated[
        bool, Parameter(negative="", help="Where it fails, find the smallest run that fails so.")
    ] = False,
    independent: Annotated[
        bool, Parameter(negative="", help="Also hold the one process to other code.")
    ] = False,
    late: Annotated[
        bool,
        Parameter(help="Also complete operations as late as they may, and compare.", negative=""),
    ] = False,
    export: Annotated[
        bool,
        Parameter(help="Also export trained weights in every format, and read them.", negative=""),
    ] = False,
    quick: Annotated[
        bool,
        Parameter(help="Three steps in float64 only; the page says what is left out.", negative=""),
    ] = False,
    out: ReportNames = (),
    json: Json = False,
) -> int:
    """Prove that a plan, or any program, computes what one device does; exit 1 where it does not.

    Of a run folder, the plan in it is proven, and proof.json is written beside it.
    """
    files = WrittenFiles.read(out, REPORT)
    if module is not None:
        if (
            subject is not None
            or ranks is not None
            or any((bisect, independent, late, export, quick, out))
        ):
            example = f"echelon prove nano --set mesh.tp=2 --module {module}"
            raise bad_argument("a module is proven under a run, without these flags", example)
        return _prove_module(module, run or "nano", settings, as_json=json)
    if subject is not None and subject.partition(":")[0].endswith(".py"):
        if run is not None or settings or any((independent, export, quick, out)):
            example = f"echelon prove --subject {subject}"
            raise bad_argument("a run and its flags say nothing of a program", example)
        return _prove_file(subject, ranks, bisect=bisect, late=late, as_json=json)
    if run is None:
        examples = ("echelon prove nano", "echelon prove --subject verify_ddp.py")
        raise bad_argument("what is to be proven: a run, or the file of a program", *examples)
    if ranks is not None:
        example = f"echelon prove {run} --set mesh.tp={max(ranks, 1)}"
        raise bad_argument("--ranks is for a program: a run has its mesh", example)
    if quick and any((bisect, independent, export)):
        example = f"echelon prove {run} --quick"
        reason = "--quick leaves out the parts that --bisect, --independent and --export look at"
        raise bad_argument(reason, example)
    extras = _Extras(bisect, independent, late, export, quick, files)
    return _prove_run(run, settings, subject, extras, as_json=json)


@dataclass(frozen=True, slots=True)
class _Extras:
    """Additional parts of the proof of a run, and its files."""

    bisect: bool
    independent: bool
    late: bool
    export: bool
    quick: bool
    files: WrittenFiles


def _prove_run(
    run: str, settings: Sequence[str], subject: str | None, extras: _Extras, *, as_json: bool
) -> int:
    from echelon.config.reading import require_subject

    if subject is not None:
        require_subject(subject)
    from echelon.api.planning import bisect as bisect_plan
    from echelon.api.planning import prove as prove_plan
    from echelon.api.planning import prove_quickly
    from echelon.config.load import load_job
    from echelon.config.rules.finders import require_trainable, require_yes_to_assumed
    from echelon.launch.host import require_memory_for_ranks
    from echelon.telemetry.run_directory import RunDirectory

    folder = RunDirectory(Path(run))
    is_run = folder.plan_file.is_file()
    if is_run and not settings:
        plan = folder.plan()
        data = load_job(folder.run_file).data if folder.run_file.is_file() else None
    else:
        job = load_job(folder.run_file if is_run else run, settings)
        plan, data = job.plan, job.data
        require_trainable(plan, job.sources)
        if job.train.weights != "none":
            require_yes_to_assumed(plan, job.sources)
    require_memory_for_ranks(plan.mesh.world_size)
    note(f"proving {plan.name} on {plan.mesh.world_size} ranks beside one process ...")
    with working("proving", lines=not as_json):
        if extras.quick:
            proof = prove_quickly(plan, subject=subject, late=extras.late)
        else:
            proof = prove_plan(
                plan,
                subject=subject,
                independent=extras.independent,
                late=extras.late,
                export=extras.export,
                data=data if subject is None else None,
            )
    if is_run and not settings and subject is None and not extras.quick:
        proof.write(folder.path / PROOF_FILE)
    if extras.files.has_report:
        extras.files.write_report(proof_page(proof.to_json()))
    smallest = partial(bisect_plan, plan, subject=subject, late=extras.late, export=extras.export)
    return _conclude(proof, "run", bisect=smallest if extras.bisect else None, as_json=as_json)


def _conclude(
    proof: Proof | SubjectProof,
    kind: Literal["run", "program"],
    *,
    bisect: Callable[[], Bisection | None] | None = None,
    as_json: bool,
) -> int:
    """Print a proof and, where it fails, the smallest run that fails so; return the exit code."""
    columns = page_columns(WIDEST)
    values: dict[str, object] = {"proven": proof.proven, "proof": proof.to_json()}
    text = proof_text(proof, columns=columns)
    if bisect is not None and not proof.proven:
        note(f"looking for the smallest {kind} that fails so ...")
        with working("bisecting", lines=not as_json):
            found = bisect()
        values["bisection"] = found and found.to_json()
        text += f"\n{bisection_text(found, columns=columns)}" if found else ""
    print_result("prove", lambda: values, lambda: text, as_json=as_json)
    if not as_json:
        proof.require()
    return 0 if proof.proven else 1


def _prove_module(module: str, run: str, settings: Sequence[str], *, as_json: bool) -> int:
    from echelon.config.reading import require_module

    require_module(module)
    from echelon.api.planning import plan as make_plan
    from echelon.api.verifying import prove_module

    plan = make_plan(run, settings=[*settings])
    note(f"proving {module} on {plan.mesh.world_size} ranks beside one process ...")
    with working("proving", lines=not as_json):
        proof = prove_module(module, plan)
    return _conclude(proof, "program", as_json=as_json)


def _prove_file(subject: str, ranks: int | None, *, bisect: bool, late: bool, as_json: bool) -> int:
    from echelon.api.verifying import bisect_program, verify
    from echelon.config.reading import (
        DEVICE_FUNCTION,
        RANK_FUNCTION,
        require_program,
        split_program,
    )
    from echelon.launch.environment import is_first_rank

    file, function = split_program(subject, RANK_FUNCTION)
    require_program(file, (DEVICE_FUNCTION, function))
    note(f"proving {subject} beside one device ...")
    with working("proving", lines=not as_json):
        proof = verify(subject, ranks=ranks, late=late)
    if not is_first_rank():
        return 0 if proof.proven else 1
    smallest = partial(bisect_program, subject, ranks=ranks, late=late) if bisect else None
    return _conclude(proof, "program", bisect=smallest, as_json=as_json)


def proof_text(proof: Proof | SubjectProof, *, columns: int = WIDEST) -> str:
    """Return the claims as tables, one column of errors for each precision, and the answer."""
    sections = claims_sections(proof.to_json())
    parts = [section_text(one, columns=columns) for one in sections]
    parts.append("proven" if proof.proven else "NOT PROVEN")
    return fit_page("\n\n".join(parts), columns=columns) + "\n"


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
