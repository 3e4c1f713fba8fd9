# SPDX-License-Identifier: Apache-2.0
"""`ec.report` and `ec.explore`: pages of a plan, a proof, a rehearsal or a run; the explorer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from echelon.api.given_plan import GivenPlan, plan_from_given
from echelon.api.training import TrainResult
from echelon.core.plan import Plan
from echelon.page.drawn.document import FigureFiles
from echelon.page.explorer.document import CLUSTER, MODEL, explorer_page
from echelon.page.html import write_page
from echelon.planner.answer.answer import PlanAnswer
from echelon.planner.explain.compare import PlanComparison
from echelon.planner.view.document import PageDocument

if TYPE_CHECKING:
    from echelon.proof.verdict import Proof
    from echelon.rehearsal.run import Rehearsal

Reported: TypeAlias = "GivenPlan | Proof | Rehearsal | PlanComparison | TrainResult | str | Path"
"""What has a page: a text or a path is the folder of a run."""


def report(found: Reported, path: str | Path) -> tuple[Path, ...]:
    """Write the page of a result to a new file, or its figures, and return the files.

    `path` says which: FILE.html is a page; NAME.svg and NAME.png are figures, each in a file
    NAME-PART.svg; anything else is a folder to make, with each figure as PART.svg. ConfigError
    where something is there or cannot be written, or a folder is no run; EnvironmentProblem for
    PNG without the extra `png`; TypeError for what has no page.
    """
    where = Path(path)
    if where.suffix.lower() == ".html":
        write_page(_page(found), where, key="path")
        return (where,)
    files = FigureFiles.at(where)
    files.require("path")
    return files.write(_page(found), key="path")


def _page(found: Reported) -> PageDocument:
    from echelon.page.documents.plan import plan_page

    if isinstance(found, str | Path | TrainResult):
        from echelon.page.documents.run import run_page

        return run_page(found.run if isinstance(found, TrainResult) else Path(found))
    if isinstance(found, PlanComparison):
        from echelon.page.documents.comparison import comparison_page

        return comparison_page(found, found.a.plan.name, found.b.plan.name)
    if isinstance(found, PlanAnswer) and found.command is not None:
        from echelon.page.documents.search import search_page

        return search_page(found.found, found.command)
    if isinstance(found, Plan | PlanAnswer):
        return plan_page(plan_from_given(found))
    return _page_of_ranks(found)


def _page_of_ranks(found: GivenPlan | Proof | Rehearsal) -> PageDocument:
    """Return the page of what ranks did, whose records need torch; else of what holds a plan."""
    from echelon.page.documents.plan import plan_page
    from echelon.page.documents.proof import proof_page
    from echelon.page.documents.rehearsal import rehearsal_page
    from echelon.proof.verdict import Proof
    from echelon.rehearsal.run import Rehearsal

    if isinstance(found, Proof):
        return proof_page(found.to_json())
    if isinstance(found, Rehearsal):
        return rehearsal_page(found.to_json())
    return plan_page(plan_from_given(found))


def explore(html: str | Path, *, model: str = MODEL, cluster: str = CLUSTER) -> Path:
    """Write the explorer to a new file that opens without a network, and return its path.

    `model` is a preset of a model, `cluster` COUNTxDEVICE; the controls start there, at a plan
    that breaks no rule. ConfigError where one is not known, or the file is there.
    """
    path = Path(html)
    write_page(explorer_page(model, cluster), path)
    return path
