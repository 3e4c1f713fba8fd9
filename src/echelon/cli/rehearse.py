"""`echelon rehearse`: what the ranks of a plan would do on GPUs, found out without one."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from echelon.cli.flags import Json, Settings, bad_argument, require_new_files
from echelon.cli.other_tools import AnyRun
from echelon.cli.output import note, page_columns, print_result


def rehearse(
    run: AnyRun,
    /,
    *,
    cluster: Annotated[
        str | None,
        Parameter(help="Rehearse what is recommended for a model here: 64xh100, or a file."),
    ] = None,
    settings: Settings = (),
    whole: Annotated[
        bool,
        Parameter(help="Rehearse all microbatches of a step, not two rounds.", negative=""),
    ] = False,
    workers: Annotated[
        int | None, Parameter(help="Processes to use; by default one for each core.")
    ] = None,
    out: Annotated[
        Path | None, Parameter(help="A file for all of it, with the memory curves (JSON).")
    ] = None,
    json: Json = False,
) -> int:
    """Rehearse a step of every distinct rank on GPUs under NCCL, without a GPU; exit 1 on a fault.

    It looks for calls that would hang, mix up or race and for reads that hold the host, and counts
    memory, kernels and bytes. Nothing has elements, so any size is rehearsed here.
    """
    from echelon.api.converting import read_plan
    from echelon.api.planning import plan as planned
    from echelon.api.rehearsing import rehearse as rehearse_plan
    from echelon.cli.rehearsal_text import rehearsal_text

    if workers is not None and workers < 1:
        raise bad_argument(f"--workers {workers} is no number of processes", "--workers 1")
    require_new_files({"--out": out})
    if cluster is None:
        plan = read_plan(run, settings=settings)[0]
    else:
        plan = planned(run, cluster, settings=settings).plan
    note(f"rehearsing {plan.name} on {plan.mesh.world_size:,} ranks ...")
    found = rehearse_plan(plan, whole=whole, workers=workers)
    values = {"rehearsal": found.to_json()}
    if out is not None:
        out.write_text(json_module.dumps(values["rehearsal"], indent=2) + "\n", encoding="utf-8")
    columns = page_columns()
    print_result(
        "rehearse", lambda: values, lambda: rehearsal_text(found, columns=columns), as_json=json
    )
    if not json:
        found.require()
    return 0 if found.holds else 1
