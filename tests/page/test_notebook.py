"""What a notebook shows of plans, proofs, rehearsals, comparisons and runs: their own numbers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

from echelon.api.training import TrainResult
from echelon.config.load import load_job
from echelon.core.rulebook.prove import PROVE_GRADIENTS
from echelon.page.documents.comparison import comparison_page
from echelon.page.documents.proof import proof_page
from echelon.page.documents.run import run_page
from echelon.page.drawn.document import static_html
from echelon.page.notebook import rehearsal_html
from echelon.planner.explain.compare import compare_plans
from echelon.proof.claims.claims import ClaimResult
from echelon.proof.verdict import Proof, ProofPass
from echelon.telemetry.summary import summarize_run
from tests.page.documents.test_rehearsal import rehearsal
from tests.page.documents.test_run import steps, written
from tests.page.drawn.reading import HOSTILE
from tests.page.drawn.test_document_static import HARMLESS, Reader


def test_a_proof_is_its_page() -> None:
    plan = load_job("nano").plan
    claim = ClaimResult(
        rule=PROVE_GRADIENTS,
        statement=HOSTILE,
        compared=3,
        max_error=3e-16,
        allowed=1e-10,
        worst="q",
        failures=(),
    )
    made = Proof(
        plan="nano",
        plan_hash=plan.content_hash(),
        mesh="tp2",
        shrunk_plan=plan,
        changes=(),
        subject="ours",
        seed=0,
        num_steps=5,
        versions={},
        passes=(ProofPass(precision="fp64", claims=(claim,), diagnosis=None),),
    )
    text = made._repr_html_()
    assert text is not None
    assert text == static_html(proof_page(made.to_json()))
    found = Reader(text)
    assert found.tags <= HARMLESS
    assert "3.0e-16" in found.cells


def test_a_rehearsal_is_its_page() -> None:
    class Found:
        def to_json(self) -> dict[str, Any]:
            return rehearsal()

    text = rehearsal_html(cast("Any", Found()))
    assert "It holds" in text
    assert Reader(text).tags <= HARMLESS


def test_two_plans_are_their_page() -> None:
    found = compare_plans(load_job("nano").plan, load_job("nano-zero3").plan)
    page = comparison_page(found, "nano", "nano-zero3")
    assert found._repr_html_() == static_html(page)


def test_a_run_is_its_page_and_one_that_is_gone_is_none(tmp_path: Path) -> None:
    path = written(tmp_path, steps(5))
    result = TrainResult(run=path, data=path, summary=cast("Any", None))
    text = result._repr_html_()
    assert text == static_html(run_page(path))
    assert text is not None
    assert "5 of 5 steps: loss 5.0000 to 1.0000" in text
    summary = summarize_run(path)
    shutil.rmtree(path)
    assert result._repr_html_() is None
    # What was read is still known.
    told = summary._repr_html_()
    assert told is not None
    assert "5 of 5 steps: loss 5.0000 to 1.0000" in told
    assert "<svg" not in told
