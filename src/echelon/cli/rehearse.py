# SPDX-License-Identifier: Apache-2.0
"""`echelon rehearse`: what the ranks of a plan would do on GPUs, found out without one."""

from __future__ import annotations

import json as json_module
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from echelon.cli.flags import (
    OUT,
    REHEARSAL,
    REPORT,
    TRACES,
    Json,
    Names,
    Settings,
    WrittenFiles,
    bad_argument,
)
from echelon.cli.other_tools import AnyRun
from echelon.cli.output import note, page_columns, print_result, working
from echelon.config.files.new_file import write_new
from echelon.core.units import binary_bytes, decimal_bytes
from echelon.page.documents.rehearsal import (
    number_sections,
    rehearsal_page,
    roofline_sections,
    work_section,
)
from echelon.planner.view.text_layout import fit_page, section_text, table

if TYPE_CHECKING:
    from echelon.rehearsal.rank import RankRehearsal
    from echelon.rehearsal.run import Rehearsal

REHEARSAL_FILE = "rehearsal.json"

MOST_RANKS = 8
"""Ranks whose memory is a row of the page: those with the highest peaks."""
MOST_KERNELS = 6
"""Kernels that are named: those that move most bytes."""


def rehearse(
    run: AnyRun,
    /,
    *,
    cluster: Annotated[
        str | None,
        Parameter(help="Rehearse what is best on COUNTxDEVICE such as 64xh100, or on a file's."),
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
        Names,
        Parameter(
            show_default=False,
            help="What to write, by its ending: all of it, with memory curves, as FILE.json; a "
            "trace of each distinct rank for Perfetto and Chrome as NAME.json.gz; a page as "
            "FILE.html, its figures as FOLDER/, NAME.svg or NAME.png; repeat for more.",
        ),
    ] = (),
    json: Json = False,
) -> int:
    """Rehearse a step of every distinct rank on GPUs under NCCL, without a GPU; exit 1 on a fault.

    It looks for calls that would hang, mix up or race and for reads that hold the host, and counts
    memory, kernels and bytes. Nothing has elements, so any size is rehearsed here. Of a run folder,
    the plan in it is rehearsed, and rehearsal.json is written beside it.
    """
    from echelon.api.converting import read_plan
    from echelon.api.planning import plan as planned
    from echelon.api.verifying import rehearse as rehearse_plan

    if workers is not None and workers < 1:
        raise bad_argument(f"--workers {workers} is no number of processes", "--workers 1")
    wanted = WrittenFiles.read(out, (REHEARSAL, TRACES, *REPORT))
    if cluster is None:
        plan = read_plan(run, settings=settings)[0]
    else:
        plan = planned(run, cluster, settings=settings).plan
    note(f"rehearsing {plan.name} on {plan.mesh.world_size:,} ranks ...")
    with working("rehearsing", lines=not json, forks=True):
        found = rehearse_plan(plan, whole=whole, workers=workers, traces=wanted.get(TRACES))
    values = {"rehearsal": found.to_json()}
    beside = None if cluster is not None or settings else _in_run_folder(run)
    text = json_module.dumps(values["rehearsal"], indent=2) + "\n"
    if beside is not None:
        beside.write_text(text, encoding="utf-8")
    if (file := wanted.get(REHEARSAL)) is not None:
        write_new(file, text, key=OUT)
    if wanted.has_report:
        wanted.write_report(rehearsal_page(found.to_json()))
    columns = page_columns()
    print_result(
        "rehearse", lambda: values, lambda: rehearsal_text(found, columns=columns), as_json=json
    )
    if not json:
        found.require()
    return 0 if found.holds else 1


def _in_run_folder(run: str) -> Path | None:
    """Return where the rehearsal of a run stands in its folder; None where it is no folder."""
    from echelon.telemetry.run_directory import RunDirectory

    folder = RunDirectory(Path(run).expanduser())
    return folder.path / REHEARSAL_FILE if folder.plan_file.is_file() else None


def rehearsal_text(found: Rehearsal, *, columns: int) -> str:
    """Return a rehearsal as a page."""
    return fit_page("\n\n".join(_parts(found, columns)), columns=columns) + "\n"


def _parts(found: Rehearsal, columns: int) -> Iterator[str]:
    plan, count = found.plan, len(found.ranks)
    ranks = "1 distinct rank" if count == 1 else f"{count:,} distinct ranks"
    few = ""
    if plan.num_microbatches < found.num_microbatches:
        few = f" of {found.num_microbatches:,}"
    yield (
        f"{plan.name}: {plan.mesh.world_size:,} ranks under NCCL, without a GPU\n"
        f"{ranks} rehearsed, {len(found.checked)} beside to compare; two steps of "
        f"{plan.num_microbatches:,}{few} microbatches"
    )
    yield _memory(found, columns)
    values = found.to_json()
    yield from (section_text(part, columns=columns) for part in number_sections(values))
    fullest = next(one for one in values["ranks"] if one["rank"] == found.fullest.rank)
    yield section_text(work_section(fullest), columns=columns)
    yield f"What moves most bytes on it:\n\n{_kernels(found.fullest, columns)}"
    yield from (section_text(one, columns=columns) for one in roofline_sections(values))
    if found.holds:
        yield (
            f"holds: {found.num_operations:,} operations have one order, are equal on all members "
            "and awaited before use; no host waits inside of a schedule"
        )
    else:
        count = len(found.faults)
        yield f"DOES NOT HOLD: {count} fault{'s' * (count > 1)}"


def _memory(found: Rehearsal, columns: int) -> str:
    fullest = sorted(found.ranks, key=lambda one: (-one.peak_bytes, one.rank))[:MOST_RANKS]
    rows = [
        (
            one.rank,
            found.plan.mesh.label(one.rank),
            binary_bytes(sum(one.held.values())),
            binary_bytes(one.peak_bytes),
            binary_bytes(sum(found.planned[one.rank].values())),
            f"{100 * found.memory_error(one):+.1f} %",
        )
        for one in fullest
    ]
    return table(("rank", "", "held", "peak", "planned peak", "plan off by"), rows, columns)


def _kernels(rank: RankRehearsal, columns: int) -> str:
    total: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for work in rank.work.values():
        total += work.bytes_by_name
        times += work.by_name
    rows = [
        (name, f"{times[name]:,}", decimal_bytes(count))
        for name, count in total.most_common(MOST_KERNELS)
    ]
    return table(("kernel", "times", "bytes moved"), rows, columns)
