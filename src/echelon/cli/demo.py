# SPDX-License-Identifier: Apache-2.0
"""`echelon demo`: plan, prove and train a small language model here, and let it write."""

from __future__ import annotations

import math
from collections.abc import Sequence

from echelon.api.generating import generate
from echelon.api.planning import prove
from echelon.api.training import TrainResult, train_job
from echelon.cli.flags import Settings
from echelon.cli.output import note
from echelon.cli.prove import PROOF_FILE, proof_text
from echelon.config.job import Job
from echelon.config.load import load_job
from echelon.core.errors import EXIT_STOPPED_WITH_CHECKPOINT
from echelon.core.optional import optional_package
from echelon.launch.host import available_memory_bytes
from echelon.page.documents.run import run_page
from echelon.page.html import write_page
from echelon.planner.report.report import plan_text

LARGE = ("mesh.pp=2", "mesh.dp_replicate=2", "mesh.tp=2", "mesh.sequence_parallel=true")
SMALL = ("mesh.pp=1", "mesh.dp_replicate=2", "mesh.tp=2", "mesh.sequence_parallel=true")
QUIET = ("observe.log_every=25",)
LARGE_MEMORY_BYTES = 6 * 2**30

REPORT_FILE = "report.html"
"""The page of the demo, in the folder of its run."""

GOAL = 0.6
"""What is left of the first validation loss once a model has learned something."""

PROMPT = "def read_lines(path):\n"
SAMPLE_TOKENS = 320  # tokens

NEXT = """echelon plan nano --set mesh.tp=3       a mistake, and what would work
echelon explain tp-divides-heads        why that is a rule
echelon config show {run}/run.toml     every setting of this run, and where it came from
echelon plan llama3-8b --set cluster.preset=64xh100 --set mesh.tp=8 --set mesh.pp=8
echelon init                            a run of your own
"""


def demo(*, settings: Settings = ()) -> int:
    """Plan, prove and train a small model on this machine; exit 1 where it does not learn."""
    job = load_job("nano", demo_settings(settings))
    optional_package("torch", extra="train", purpose="the demo")
    _title("1. The plan: what each rank holds, and what it sends")
    print(plan_text(job.plan))
    _title("2. The proof: these ranks compute what one process computes")
    proof = prove(job.plan)
    print(proof_text(proof), flush=True)
    proof.require()
    _title(f"3. The run: {job.train.steps} steps on the source of Python's standard library")
    result = train_job(job, say=note)
    proof.write(result.run / PROOF_FILE)
    write_page(run_page(result.run), result.run / REPORT_FILE)
    if result.summary.stopped:
        note(f"go on: echelon train {result.run}/run.toml --resume {result.run}")
        return EXIT_STOPPED_WITH_CHECKPOINT
    print()
    _title("4. What it writes after its first line")
    print(generate(result, PROMPT, max_tokens=SAMPLE_TOKENS).text, end="\n\n")
    return _conclude(job, result)


def demo_settings(settings: Sequence[str]) -> list[str]:
    """Return the demo's settings for this machine, and those of the user in their place."""
    split = LARGE if available_memory_bytes() >= LARGE_MEMORY_BYTES else SMALL
    keys = {text.partition("=")[0].strip() for text in settings}
    ours = [text for text in (*split, *QUIET) if text.partition("=")[0] not in keys]
    return [*ours, *settings]


def learned(first: float | None, last: float | None) -> bool:
    """Return whether the validation loss fell below the goal."""
    return first is not None and last is not None and math.isfinite(first) and last < GOAL * first


def _conclude(job: Job, result: TrainResult) -> int:
    first, last = result.summary.first_validation, result.summary.last_validation
    _title("5. What to try next")
    print(NEXT.format(run=result.run))
    print(f"report: {result.run / REPORT_FILE}  (plan, proof and run in one page: open it)\n")
    if first is None or last is None or result.summary.num_validations == 1:
        times = "not validated" if first is None else "validated only once"
        note(f"the model was {times}, so nobody knows whether it learned")
        return 1
    share = f"{first:.3f} -> {last:.3f}, {100 * last / first:.0f} % of the first"
    if not learned(first, last):
        note(f"validation loss {share}: above {100 * GOAL:.0f} %, so it has not learned enough")
        return 1
    print(f"validation loss {share}, on {job.plan.mesh.world_size} ranks; see {result.run}")
    return 0


def _title(text: str) -> None:
    print(f"{text}\n{'-' * len(text)}\n", flush=True)
