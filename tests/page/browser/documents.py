"""A document of each kind, as the commands write them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from echelon.config.load import load_job
from echelon.core.plan import Plan
from echelon.page.documents.plan import plan_page
from echelon.page.documents.proof import proof_page
from echelon.page.documents.rehearsal import rehearsal_page
from echelon.page.documents.run import run_page
from echelon.planner.view.document import PageDocument
from tests.page.documents.test_proof import proof
from tests.page.documents.test_rehearsal import rehearsal
from tests.page.documents.test_run import steps
from tests.telemetry.recorded_runs import plan_of, stage_times, write_run

HOSTILE = "</script><img src=x onerror=alert(1)>" + "x" * 300


@cache
def plan() -> Plan:
    """Return a plan with a pipeline, tensor and data ranks."""
    return load_job("nano", ("mesh.pp=2", "mesh.dp_replicate=2", "mesh.tp=2")).plan


def _run() -> PageDocument:
    times = stage_times(1.0, 1.5)
    with TemporaryDirectory() as folder:
        run = write_run(Path(folder), plan_of(), [{step: times for step in range(1, 4)}])
        metrics = run.path / "metrics.jsonl"
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        numbers = json.loads(steps(1).splitlines()[1])
        told = [{**numbers, **line} if line["kind"] == "step" else line for line in lines]
        metrics.write_text("".join(json.dumps(line) + "\n" for line in told))
        (run.path / "proof.json").write_text(json.dumps(proof(holds=True)))
        return run_page(run.path)


@cache
def documents() -> dict[str, PageDocument]:
    """Return a document of each kind by name."""
    hostile = proof(holds=False, error="nan")
    hostile["plan"] = HOSTILE
    hostile["passes"][0]["claims"][0]["statement"] = HOSTILE
    fault = {"rule": "rehearse-order", "ranks": [1], "text": "rank 1 sums before it sends"}
    return {
        "plan": plan_page(plan()),
        "run": _run(),
        "proof": proof_page(proof(holds=False)),
        "rehearsal": rehearsal_page(rehearsal(fault)),
        "hostile": proof_page(hostile),
    }
