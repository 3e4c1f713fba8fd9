"""The page of a proof: each claim with its numbers, and the ranks that have the first wrong."""

from __future__ import annotations

from typing import Any

from echelon.page.documents.proof import claims_sections, proof_page
from echelon.planner.view.document import HeatFigure

DIAGNOSIS = {
    "rule": "prove-gradients",
    "step": 2,
    "tensor": "layers.0.attention.q.weight",
    "where": "block 0, cut by tp",
    "factor": "2",
    "axis": "tp",
    "value": 2.0,
    "says": "twice too large.",
    "residual": 0.0,
    "ranks": (1, 3),
    "num_wrong": 3,
    "num_compared": 38,
}


def claim(*, holds: bool, error: float | str) -> dict[str, Any]:
    failure = {"step": 2, "subject": "q", "error": error, "allowed": 1e-10, "detail": "2x"}
    return {
        "rule": "prove-gradients",
        "statement": "every gradient before clipping",
        "holds": holds,
        "compared": 1900,
        "max_error": error,
        "allowed": 1e-10,
        "worst": "layers.0.attention.q.weight",
        "note": "",
        "failures": [] if holds else [failure],
    }


def proof(*, holds: bool, error: float | str = 3e-16) -> dict[str, Any]:
    return {
        "proven": holds,
        "plan": "nano",
        "plan_hash": "98abfb2eaf273b8d",
        "mesh": "pp2 x tp2",
        "num_steps": 5,
        "seed": 0,
        "subject": "ours",
        "shrunk_plan": {
            "layout": {"mesh": {"pp": 2, "tp": 2}},
            "mathematics": {"model": {"layers": 2, "hidden": 16}},
        },
        "passes": [
            {
                "precision": "fp64",
                "claims": [claim(holds=holds, error=error)],
                "diagnosis": None if holds else DIAGNOSIS,
            }
        ],
        "independent": None,
        "whole_run": None,
        "data": None,
        "resumed": None,
    }


def test_a_proof_that_holds_says_so_and_lists_its_claims() -> None:
    page = proof_page(proof(holds=True))
    assert page.good
    assert page.verdict.startswith("Proven")
    assert [one.id for one in page.sections] == ["proof", "proof-claims"]
    table, by_precision = (one.table for one in page.sections)
    assert by_precision is not None
    assert by_precision.head == ("claim", "compared", "fp64")
    assert by_precision.rows[0][1:] == ("1900", "3.0e-16 of 1.0e-10")
    assert table is not None
    row = dict(zip(table.head, table.rows[0], strict=True))
    assert row == {
        "claim": "every gradient before clipping",
        "precision": "fp64",
        "compared": "1,900",
        "off by": "3.0e-16",
        "may be off by": "1.0e-10",
        "worst": "layers.0.attention.q.weight",
        "holds": "yes",
    }


def test_data_that_are_not_here_have_a_note_and_no_table() -> None:
    absent = {"precision": "tokens", "claims": [], "diagnosis": None, "note": "data not found"}
    section = [*claims_sections({**proof(holds=True), "data": absent})][-1]
    assert section.id == "proof-data"
    assert section.table is None
    assert section.notes == ("data not found",)


def test_the_first_wrong_tensor_is_dark_on_its_ranks_alone() -> None:
    page = proof_page(proof(holds=False, error="inf"))
    assert not page.good
    assert "twice too large" in page.verdict
    wrong = page.sections[2]
    figure = wrong.figure
    assert isinstance(figure, HeatFigure)
    assert figure.rows[0].values == (0.0, 1.0, 0.0, 1.0)
    assert figure.rows[0].texts == ("right", "wrong", "right", "wrong")
    assert "its factor is 2" in wrong.summary
    assert wrong.table is not None
    assert wrong.table.rows[0][3] == "inf"
    assert wrong.commands == ("echelon explain prove-gradients",)
