"""The evidence of a plan has the reports of every rank beside each step of one device."""

from __future__ import annotations

from echelon.proof.shrink import shrink
from tests.proof.layouts import layout
from tests.proof.replicas import replicas


def test_each_step_is_beside_the_report_of_each_rank() -> None:
    evidence = replicas(shrink(layout(dp=2), precision="fp64"), 2)
    pairs = [(step.step, rank, report.loss) for step, rank, report in evidence.reports()]
    assert [pair[:2] for pair in pairs] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert pairs[0][2] == evidence.steps[0].loss
    assert list(evidence.changed_outside(0)) == []
