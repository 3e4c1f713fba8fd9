"""What all ranks must decide alike: by what the loss is scaled, and whether a step is skipped."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.prove.checks import Check, Evidence


def loss_scale(evidence: Evidence) -> Iterator[Check]:
    """Compare the loss scale of each step, and whether it was skipped, rank by rank."""
    for oracle in evidence.oracle:
        for rank, report in enumerate(evidence.observed.reports(oracle.step)):
            if report.skipped is not None:
                wrong = report.skipped != oracle.skipped
                did = {True: "skipped the step", False: "took the step"}
                yield Check(
                    step=oracle.step,
                    subject=f"decision of rank {rank}",
                    error=1.0 if wrong else 0.0,
                    allowed=0.0,
                    detail=f"{did[report.skipped]}; one device {did[oracle.skipped]}" * wrong,
                    position=rank,
                )
            if report.loss_scale is not None:
                yield Check(
                    step=oracle.step,
                    subject=f"loss scale of rank {rank}",
                    error=abs(report.loss_scale - oracle.loss_scale) / oracle.loss_scale,
                    allowed=0.0,
                    detail=f"{report.loss_scale:.10g} instead of {oracle.loss_scale:.10g}",
                    position=rank,
                )
