# SPDX-License-Identifier: Apache-2.0
"""routing.jsonl: how many tokens chose each expert, one layer of one step to a line.

One rank of each pipeline stage writes the layers of its stage, every `observe.log_every` steps, the
first and the last one: rank 0 into routing.jsonl, rank 4 into routing.rank-0004.jsonl. What the
whole model did in every step is in metrics.jsonl.

What a rank received is read from its events: what its experts make of tokens goes back by the way
on which they came, so the bytes of one message back ("experts.combine") are those of the buffers
that one dispatch filled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.core.errors import ConfigError
from echelon.core.plan import Plan
from echelon.core.rulebook.run import RUN_HAS_EXPERTS, STEP_RECORDED
from echelon.telemetry.events import ranks_with_events
from echelon.telemetry.json_lines import read_entries
from echelon.telemetry.recorded_steps import RecordedSteps
from echelon.telemetry.run_directory import open_run
from echelon.training.observer import RoutingSummary

if TYPE_CHECKING:
    from echelon.parallel.expert import LayerLoad

_OF_A_RANK = re.compile(r"routing(\.rank-\d{4,})?\.jsonl", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedLoad:
    """Say how a layer routed the tokens of a step: those that chose each expert, drops included."""

    layer: int
    counts: tuple[int, ...]
    dropped: int
    aux_loss: float | None
    z_loss: float | None

    @property
    def mean(self) -> float:
        """Return the tokens of an expert where all have as many."""
        return sum(self.counts) / len(self.counts)

    @property
    def imbalance(self) -> float:
        """Return the load of the busiest expert over the mean."""
        return max(self.counts) / self.mean if self.mean else 1.0

    @property
    def busiest(self) -> int:
        """Return the number of the expert with the most tokens."""
        return self.counts.index(max(self.counts))


def load_entries(step: int, loads: Mapping[int, LayerLoad]) -> Iterator[dict[str, object]]:
    """Yield what is written of a step, one layer at a time."""
    for layer, load in sorted(loads.items()):
        told = {name: getattr(load, name) for name in ("dropped", "aux_loss", "z_loss")}
        yield {"step": step, "layer": layer, "counts": list(load.counts), **told}


def routing_path(run_dir: Path, rank: int) -> Path:
    """Return where a rank writes the loads of its layers."""
    return run_dir / ("routing.jsonl" if rank == 0 else f"routing.rank-{rank:04d}.jsonl")


def routing_entry(routing: RoutingSummary | None) -> dict[str, object]:
    """Return what the entry of a step in metrics.jsonl says of experts; nothing of none."""
    told = ("imbalance", "assignments", "dropped", "aux_loss", "z_loss")
    return {} if routing is None else {name: getattr(routing, name) for name in told}


def read_routing(run_dir: Path) -> dict[int, tuple[RecordedLoad, ...]]:
    """Return the loads of the layers, in order, by step; ConfigError where a line cannot be read.

    A step that a resumed run took again counts once, as it was taken last.
    """
    by_step: dict[int, dict[int, RecordedLoad]] = {}
    for path in sorted(run_dir.glob("routing*.jsonl")):
        if not _OF_A_RANK.fullmatch(path.name):
            continue
        of_rank: dict[int, dict[int, RecordedLoad]] = {}
        for entry in read_entries(path):
            step = entry.whole("step")
            while of_rank and next(reversed(of_rank)) > step:
                of_rank.popitem()
            layer = entry.whole("layer")
            of_rank.setdefault(step, {})[layer] = RecordedLoad(
                layer=layer,
                counts=entry.whole_numbers("counts"),
                dropped=entry.whole("dropped"),
                aux_loss=entry.number("aux_loss"),
                z_loss=entry.number("z_loss"),
            )
        for step, layers in of_rank.items():
            by_step.setdefault(step, {}).update(layers)
    return {
        step: tuple(layers[layer] for layer in sorted(layers))
        for step, layers in sorted(by_step.items())
    }


COMBINE = "experts.combine"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertHotspots:
    """Hold how the layers of a run routed the tokens of one step.

    `received_bytes` is, by rank, the most that arrived from other ranks for one layer and one
    microbatch (one chunk of it) over one hop; ranks without events of that step are not in it.
    """

    run: Path
    plan: Plan
    step: int
    layers: tuple[RecordedLoad, ...]
    received_bytes: dict[int, int]

    @property
    def worst(self) -> RecordedLoad:
        """Return the layer whose load is least even."""
        return max(self.layers, key=lambda load: load.imbalance)

    @property
    def assignments(self) -> int:
        """Return how often an expert was chosen, over all layers."""
        return sum(sum(load.counts) for load in self.layers)

    @property
    def dropped(self) -> int:
        """Return how many of these had no room."""
        return sum(load.dropped for load in self.layers)


def read_hotspots(run_dir: Path, *, step: int | None = None) -> ExpertHotspots:
    """Return where the tokens of a step went, the last one that was written down by default.

    ConfigError where the run has no experts, or nothing of that step.
    """
    plan = open_run(run_dir).plan()
    if plan.model.experts is None:
        raise ConfigError(
            RUN_HAS_EXPERTS.problem(
                f"{run_dir} trains {plan.model.name}, whose blocks are all dense",
                set_by="--experts",
                suggestions=(f"echelon observe {run_dir}",),
            )
        )
    recorded = read_routing(run_dir)
    chosen = max(recorded, default=None) if step is None else step
    if chosen is None or chosen not in recorded:
        asked = "no step" if chosen is None else f"step {chosen}"
        raise ConfigError(
            STEP_RECORDED.problem(
                f"{asked} of {run_dir} has loads of experts: they are written every "
                "observe.log_every steps, the first and the last one",
                set_by="" if step is None else "--step",
                suggestions=[f"--step {one}" for one in sorted(recorded)[-6:]],
            )
        )
    return ExpertHotspots(
        run=run_dir,
        plan=plan,
        step=chosen,
        layers=recorded[chosen],
        received_bytes=_received(run_dir, chosen),
    )


def _received(run_dir: Path, step: int) -> dict[int, int]:
    ranks = ranks_with_events(run_dir)
    steps = RecordedSteps(run_dir, ranks) if ranks else None
    if steps is None or step not in steps.numbers:
        return {}
    return {
        rank: max((event.bytes for event in events if event.name == COMBINE), default=0)
        for rank, events in steps.read(step).events.items()
    }
