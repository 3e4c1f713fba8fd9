"""The page of a rehearsal: peaks beside those of the plan, the curve, the work, the faults."""

from __future__ import annotations

from typing import Any

from echelon.core.units import binary_bytes
from echelon.page.documents.rehearsal import rehearsal_page
from echelon.planner.view.document import BarsFigure, LinesFigure


def rank(number: int, peak: int, planned: int) -> dict[str, Any]:
    return {
        "rank": number,
        "peak_bytes": peak,
        "planned_peak_bytes": planned,
        "sent_bytes": {"tp": 2_000_000},
        "work": {"F": {"kernels": 1200, "bytes": 3_000_000, "flops": 5_000_000}},
        "curve": [
            {"action": "F0", "kept": peak // 2, "peak": peak // 2 + 10},
            {"action": "B0", "kept": peak // 4, "peak": peak},
        ],
    }


def rehearsal(*faults: dict[str, Any]) -> dict[str, Any]:
    return {
        "plan": "nano",
        "plan_hash": "98abfb2eaf273b8d",
        "world_size": 4,
        "holds": not faults,
        "faults": list(faults),
        "num_operations": 4976,
        "ranks": [rank(0, 1000, 1010), rank(2, 4000, 3980)],
    }


def test_peaks_stand_beside_those_of_the_plan_the_fullest_first() -> None:
    page = rehearsal_page(rehearsal())
    assert page.good
    peaks, curve, work = page.sections
    assert isinstance(peaks.figure, BarsFigure)
    assert [(row.label, row.total) for row in peaks.figure.rows] == [
        ("rank 2, rehearsed", 4000.0),
        ("rank 2, planned", 3980.0),
        ("rank 0, rehearsed", 1000.0),
        ("rank 0, planned", 1010.0),
    ]
    assert peaks.summary == "The plan is off by +1.00 % at most, of 2 ranks."
    assert isinstance(curve.figure, LinesFigure)
    assert [one.values for one in curve.figure.series] == [(2000, 1000), (2010, 4000)]
    assert curve.figure.planned_text == binary_bytes(3980)
    assert work.table is not None
    assert work.table.rows == (("F", "1,200", "3.00 MB", "5.00M"),)


def test_faults_come_first() -> None:
    fault = {"rule": "rehearse-order", "ranks": [1], "text": "rank 1 sums before it sends"}
    page = rehearsal_page(rehearsal(fault))
    assert not page.good
    assert page.verdict == "It does not hold: 1 fault. rank 1 sums before it sends"
    table = page.sections[0].table
    assert table is not None
    assert table.rows == (("rehearse-order", "1", "rank 1 sums before it sends"),)
