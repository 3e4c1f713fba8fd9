# SPDX-License-Identifier: Apache-2.0
"""What a notebook shows of a plan, an answer, a proof, a rehearsal, a comparison, a run: its page.

Records stand floors below a page: they find these functions by their names in `core/notebook.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from echelon.core.notebook import NOTEBOOK_VIEWS
from echelon.page.drawn.document import static_html

if TYPE_CHECKING:
    from echelon.core.plan import Plan
    from echelon.planner.answer.answer import PlanAnswer, SizesAnswer
    from echelon.planner.explain.compare import PlanComparison
    from echelon.proof.verdict import Proof
    from echelon.rehearsal.run import Rehearsal
    from echelon.telemetry.summary import RunSummary


@NOTEBOOK_VIEWS.register("plan")
def plan_html(plan: Plan) -> str:
    """Return what a notebook shows of a plan: its page, without a script."""
    from echelon.page.documents.plan import plan_page

    return static_html(plan_page(plan))


@NOTEBOOK_VIEWS.register("answer")
def answer_html(answer: PlanAnswer) -> str:
    """Return what a notebook shows of the answer of a search."""
    from echelon.page.documents.search import search_page

    return static_html(search_page(answer.found, answer.command))


@NOTEBOOK_VIEWS.register("sizes")
def sizes_html(sizes: SizesAnswer) -> str:
    """Return what a notebook shows of a model on four clusters."""
    from echelon.page.documents.search import sizes_page

    return static_html(sizes_page(sizes))


@NOTEBOOK_VIEWS.register("proof")
def proof_html(proof: Proof) -> str:
    """Return what a notebook shows of a proof."""
    from echelon.page.documents.proof import proof_page

    return static_html(proof_page(proof.to_json()))


@NOTEBOOK_VIEWS.register("rehearsal")
def rehearsal_html(rehearsal: Rehearsal) -> str:
    """Return what a notebook shows of a rehearsal."""
    from echelon.page.documents.rehearsal import rehearsal_page

    return static_html(rehearsal_page(rehearsal.to_json()))


@NOTEBOOK_VIEWS.register("comparison")
def comparison_html(found: PlanComparison) -> str:
    """Return what a notebook shows of two plans beside one another."""
    from echelon.page.documents.comparison import comparison_page

    return static_html(comparison_page(found, found.a.plan.name, found.b.plan.name))


@NOTEBOOK_VIEWS.register("summary")
def summary_html(summary: RunSummary) -> str:
    """Return what a notebook shows of what a run did so far."""
    from echelon.page.documents.run import summary_page

    return static_html(summary_page(summary))


def run_html(folder: Path) -> str:
    """Return what a notebook shows of the folder of a run; ConfigError where it is none."""
    from echelon.page.documents.run import run_page

    return static_html(run_page(folder))
