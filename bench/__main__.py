"""One command for every bench: `python -m bench NAME [its own options]`; `--list` shows them."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A bench: what it answers, and how long it takes on two cores."""

    answers: str
    takes: str
    module: str = ""
    """Name of the module; blank if it is `bench.NAME`."""
    root: bool = False
    """True if it needs root, for namespaces and shaped links."""


BENCHES = {
    "train": Bench(
        answers="steps against peers on this machine: seconds, CPU, bytes, memory", takes="30 min"
    ),
    "before": Bench(answers="this tree against a checkout of an earlier commit", takes="20 min"),
    "operators": Bench(
        answers="where the CPU seconds of a step go, framework by framework", takes="5 min"
    ),
    "pipeline": Bench(
        answers="schedules against the simulator, torch's same schedule, the fastest 1F1B",
        takes="1 h a part",
    ),
    "context": Bench(answers="attention of long sequences, every kind against peers", takes="1 h"),
    "generation": Bench(
        answers="greedy generation against transformers, the same tokens", takes="10 min"
    ),
    "scaling": Bench(answers="strong and weak scaling over data ranks", takes="15 min"),
    "threads": Bench(answers="replicas on threads against ranks", takes="15 min"),
    "cluster": Bench(
        answers="steps across two hosts joined by slow links, against peers",
        takes="30 min",
        root=True,
    ),
    "wire": Bench(
        answers="bytes on the wire against the bytes that Echelon records",
        takes="10 min",
        root=True,
    ),
    "accuracy": Bench(
        answers="predicted against published runs",
        takes="5 min",
        module="bench.planner_accuracy",
    ),
    "accuracy.fit": Bench(
        answers="constants fitted anew to published runs; left-out errors", takes="1 h"
    ),
    "accuracy.residuals": Bench(
        answers="what fits without a run's like make of it: the bands of a plan", takes="1 h"
    ),
    "known_answers": Bench(
        answers="published production choices against the plan that we recommend", takes="10 min"
    ),
    "planner_regret": Bench(
        answers="predicted against measured steps here; the first plan beside the fastest",
        takes="1 h",
    ),
    "planner_speed": Bench(answers="plans per CPU second; seconds of an answer", takes="5 min"),
    "weights": Bench(
        answers="memory of weights that leave and come in, way by way",
        takes="15 min",
        module="tests.training.weights.memory",
    ),
    "spmd_types": Bench(
        answers="a tensor-parallel pair, right and wrong, under torch's types of shards",
        takes="1 min",
        module="tests.examples.spmd_types_check",
    ),
    "faults": Bench(answers="kill -9 and SIGSTOP at random moments: how runs end", takes="20 min"),
    "faults.saves": Bench(
        answers="kills at random moments of saving: the checkpoint left must load", takes="10 min"
    ),
    "desync": Bench(
        answers="ten mistakes in every split: who is named, and how soon",
        takes="30 min",
        module="tests.launch.desync.table",
    ),
    "gpu": Bench(
        answers="one CUDA GPU: tests, training, kernels, offload, experts",
        takes="9 min",
        module="bench.gpu.run",
    ),
}


def listed() -> str:
    """Return a line for each bench."""
    width = max(map(len, BENCHES))
    return "\n".join(
        f"{name:{width}}  {bench.answers} ({bench.takes}{', root' if bench.root else ''})"
        for name, bench in BENCHES.items()
    )


def main(words: Sequence[str]) -> int:
    """List the benches, or run one with the options that follow its name."""
    if not words or words[0] in ("--list", "-h", "--help"):
        print(listed())
        return 0
    name, *options = words
    if name not in BENCHES:
        print(f"error: no bench is called {name}; python -m bench --list", file=sys.stderr)
        return 2
    sys.argv = [f"python -m bench {name}", *options]
    runpy.run_module(BENCHES[name].module or f"bench.{name}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
