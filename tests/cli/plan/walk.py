"""Plans of random searches, written as run files and shown again: what a search says, a page says.

`python -m tests.cli.plan.walk 500` walks so many plans; the test of the same name takes fifty.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from echelon.config.files.measurements import unit_times_from_job
from echelon.config.load import load_job
from echelon.core.errors import EchelonError
from echelon.interop.plan_settings import needed_settings, run_toml
from echelon.planner.answer.search_json import answer_json
from echelon.planner.report.report import plan_json
from echelon.planner.search.request import make_request
from echelon.planner.search.search import SearchResult, search

MODELS = ("nano", "gpt2", "gpt2-xl", "llama3-8b", "mistral-7b", "qwen3-4b", "mixtral-8x7b")
LARGE = ("llama2-70b", "qwen3-30b-a3b", "deepseek-v3", "gpt3-175b")
CLUSTERS = ("4xcpu-core", "8xh100", "8xa100-80gb", "16xh200", "32xb200", "8xl40s", "16xmi300x")
PINS = {
    "pp": (1, 1, 2, 4, 8),
    "tp": (1, 1, 2, 4),
    "cp": (1, 1, 1, 2),
    "schedule": (
        *("1f1b", "gpipe", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "dualpipe"),
        *("interleaved-1f1b", "breadth-first", "naive"),
    ),
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "full", "full/2"),
    "microbatch": (1, 2),
}
SHOWN = ("step_s", "seconds", "step_band_s", "held_bytes", "bytes", "held_band_bytes", "mfu")
"""What is the same of a plan in an answer and on its page, beside its stages."""
OF_A_SEARCH = 3
"""Plans of each answer that are looked at."""


def answers(seed: int, models: tuple[str, ...] = MODELS) -> Iterator[SearchResult]:
    """Yield the answers of random searches; those that find nothing are left out."""
    random = Random(seed)
    while True:
        pins = {name: random.choice(PINS[name]) for name in random.sample([*PINS], 3)}
        pins.setdefault("pp", random.choice(PINS["pp"]))
        sequences = random.choice((16, 24, 64, 96))
        try:
            request = make_request(
                random.choice(models),
                cluster=random.choice(CLUSTERS),
                settings=[f"batch.global_sequences={sequences}", "batch.sequence_length=1024"],
                pins=[f"{name}={value}" for name, value in pins.items()],
            )
        except EchelonError:
            continue
        found = search(replace(request, top=OF_A_SEARCH))
        if found.best is not None:
            yield found


def both(seed: int, count: int, models: tuple[str, ...] = MODELS) -> Iterator[tuple[Any, Any]]:
    """Yield what an answer says of each of so many plans, and what the page of its run says."""
    left = count
    for answer in answers(seed, models):
        told = answer_json(answer)["plans"]
        for one, says in zip(answer.ranked, told, strict=True):
            assert one.plan is not None
            with tempfile.TemporaryDirectory() as folder:
                run = needed_settings(one.plan)
                for name, text in run.beside.items():
                    (Path(folder) / name).write_text(text)
                path = Path(folder) / "run.toml"
                path.write_text(run_toml(run))
                job = load_job(str(path))
                page = plan_json(job.plan, unit_times_from_job(job))
            page["written"] = sorted(run.settings)
            yield says, page
            left -= 1
            if not left:
                return


def difference(says: Any, page: Any) -> str:
    """Return what an answer and a page say otherwise of a plan; nothing where they agree.

    Both cut stages alike, so no run file has to list them.
    """
    wrong = [name for name in SHOWN if says[name] != page["estimate"][name]]
    if says["stages"] and says["stages"] != page["plan"]["layout"]["pipeline"]["stages"]:
        wrong.append("stages")
    if "pipeline.stages" in page["written"]:
        wrong.append("stages that are not those of auto")
    return ", ".join(wrong)


if __name__ == "__main__":
    count, failed = int(sys.argv[1]), 0
    for says, page in both(seed=count, count=count, models=(*MODELS, *LARGE)):
        if wrong := difference(says, page):
            failed += 1
            print(wrong, json.dumps(page["plan"]["layout"]))
    print(f"{count} plans, {failed} of them otherwise on their page")
    sys.exit(failed > 0)
