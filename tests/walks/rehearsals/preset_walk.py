"""Every preset, rehearsed: `python -m tests.walks.rehearsals.preset_walk [NAME ...]`.

A run preset is rehearsed as it is. Of a model preset it is what `echelon plan` recommends on the
first of some clusters of H100 that it fits, or on the one of a published run (`PUBLISHED`). Each
leaves a line: ranks, classes, seconds of wall and of CPU, memory of the walk so far, how far the
planned peak is from the rehearsed one, and what is wrong. Exit 1 where a preset has a fault, or
sends other bytes than the formulas say. With the same results (JSON lines) the walk goes on where
it stopped.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from echelon.api.planning import plan as planned
from echelon.config.load import load_job
from echelon.config.presets import preset_names
from echelon.core.errors import ConfigError
from echelon.core.plan import Plan
from echelon.core.version import source_hash
from echelon.rehearsal.run import rehearse
from tests.walks.matrix.walk import append_line, lines_of

PUBLISHED: Mapping[str, str] = {
    "llama3.1-405b": "16384xh100",
    "deepseek-v3": "2048xh800",
    "gpt3-175b": "1024xa100-80gb",
    "llama3-70b": "64xh100",
    "mixtral-8x7b": "64xh100",
}
"""Clusters of published runs."""

COUNTS = (8, 16, 64, 256)
"""Devices of the clusters that are tried for other models."""

DEVICE = "h100"


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetRehearsal:
    """Say how one preset fared."""

    name: str
    """The preset."""
    cluster: str
    """What it was planned on; "" of a run preset."""
    code: str
    """Hash of the code that it ran with."""
    mesh: str
    """How the plan splits it."""
    world_size: int
    """Its ranks."""
    rehearsed: int
    """Ranks that were rehearsed: one of each class."""
    operations: int
    """Operations whose order was proven."""
    memory_errors: tuple[float, ...]
    """By how much the plan's peak is off, as a share, on each rank that was rehearsed."""
    seconds: float
    """What the rehearsal took."""
    cpu_seconds: float
    """What the rehearsal took on all processors."""
    memory_gb: float
    """The most that this process and the largest that it started had in the walk so far, in GB."""
    problems: tuple[str, ...]
    """What is wrong."""

    def line(self) -> str:
        """Return the line of a table."""
        off = max(self.memory_errors, key=abs)
        told = "; ".join(self.problems) or "holds"
        return (
            f"{self.name:20} {self.cluster or '-':15} {self.world_size:6} {self.rehearsed:5} "
            f"{self.operations:8} {self.seconds:8.1f} {self.cpu_seconds:8.1f} "
            f"{self.memory_gb:6.2f} {off:+8.2%}  {told}"
        )


TITLES = (
    f"{'preset':20} {'cluster':15} {'ranks':>6} {'kinds':>5} {'calls':>8} {'wall s':>8} "
    f"{'cpu s':>8} {'GB':>6} {'peak off':>8}"
)


def names() -> list[str]:
    """Return all presets of runs and of models, those of published runs last."""
    every = [*preset_names("runs"), *(one for one in preset_names("models") if one != "nano")]
    return [one for one in every if one not in PUBLISHED] + list(PUBLISHED)[::-1]


def plan_of(name: str) -> tuple[Plan, str]:
    """Return the plan of a preset, and the cluster that it was made for ("" of a run's own)."""
    if name in preset_names("runs"):
        return load_job(name, ()).plan, ""
    clusters = [PUBLISHED[name]] if name in PUBLISHED else [f"{n}x{DEVICE}" for n in COUNTS]
    for cluster in clusters[:-1]:
        try:
            return planned(name, cluster).plan, cluster
        except ConfigError:
            continue
    return planned(name, clusters[-1]).plan, clusters[-1]


def rehearse_preset(name: str, code: str, *, workers: int | None = None) -> PresetRehearsal:
    """Rehearse one preset."""
    plan, cluster = plan_of(name)
    before = _cpu_seconds()
    found = rehearse(plan, workers=workers)
    problems = [f"{one.rule.id}: {one.text}" for one in found.faults]
    problems += [
        f"rank {one.rank} sends {dict(one.sent)}, and {dict(said)} by the formulas"
        for one in found.ranks
        if dict(one.sent) != dict(said := found.sent[one.rank])
    ]
    return PresetRehearsal(
        name=name,
        cluster=cluster,
        code=code,
        mesh=str(plan.mesh),
        world_size=plan.mesh.world_size,
        rehearsed=len(found.ranks),
        operations=found.num_operations,
        memory_errors=tuple(round(found.memory_error(one), 5) for one in found.ranks),
        seconds=round(found.seconds, 1),
        cpu_seconds=round(_cpu_seconds() - before, 1),
        memory_gb=round(_memory_gb(), 2),
        problems=tuple(problems),
    )


def walk(chosen: Sequence[str], results: Path | None) -> Iterator[PresetRehearsal]:
    """Yield how each preset fared; what `results` has of this very code is not done again."""
    code = source_hash()[:16]
    known = {line["name"]: line for line in lines_of(results, code)}
    for name in chosen:
        if name in known:
            tuples = {key: tuple(known[name][key]) for key in ("memory_errors", "problems")}
            yield PresetRehearsal(**{**known[name], **tuples})
            continue
        one = rehearse_preset(name, code)
        append_line(results, asdict(one))
        yield one


def _cpu_seconds() -> float:
    both = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, both))


def _memory_gb() -> float:
    """Return the peaks of this process and of the largest of those that it started; they are of the
    whole walk so far."""
    both = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(used.ru_maxrss for used in map(resource.getrusage, both)) * 1024 / 1e9


def main(arguments: Sequence[str] | None = None) -> int:
    """Rehearse presets; return 1 where one has a fault or sends other bytes."""
    parser = argparse.ArgumentParser(description="Rehearse every preset.")
    parser.add_argument("names", nargs="*", help="presets; all without any")
    parser.add_argument("--results", type=Path, help="JSON lines; what is there is not done again")
    options = parser.parse_args(arguments)
    started, failed = time.monotonic(), 0
    print(TITLES)
    for one in walk(options.names or names(), options.results):
        failed += bool(one.problems)
        print(one.line(), flush=True)
    print(f"{failed} with a fault; {time.monotonic() - started:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
