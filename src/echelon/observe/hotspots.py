"""Where the tokens of a step went: the busy experts of each layer, and what ranks received.

Loads are those of routing.jsonl. What a rank received is read from its events: what its experts
make of tokens goes back by the way on which they came, so the bytes of one message back
("experts.combine") are those of the buffers that one dispatch filled.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from echelon.core.errors import ConfigError
from echelon.core.event import Event
from echelon.core.plan import Plan
from echelon.core.rulebook.observe import RUN_HAS_EXPERTS, STEP_RECORDED
from echelon.observe.events import ranks_with_events
from echelon.observe.recorded_steps import RecordedSteps
from echelon.observe.routing import RecordedLoad, read_routing
from echelon.observe.run_directory import open_run

COMBINE = "experts.combine"


@dataclass(frozen=True, slots=True, kw_only=True)
class HotSpots:
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


def read_hotspots(run_dir: Path, *, step: int | None = None) -> HotSpots:
    """Return where the tokens of a step went, the last one that was written down by default.

    ConfigError where the run has no experts, or nothing of that step.
    """
    plan = open_run(run_dir).plan()
    if plan.model.experts is None:
        raise ConfigError(
            RUN_HAS_EXPERTS.problem(
                f"{run_dir} trains {plan.model.name}, whose blocks are all dense",
                set_by="--experts",
                works=(f"echelon observe {run_dir}",),
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
                works=[f"--step {one}" for one in sorted(recorded)[-6:]],
            )
        )
    return HotSpots(
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
    events = steps.read(step).events
    return {rank: max(map(_bytes_back, of_rank), default=0) for rank, of_rank in events.items()}


def _bytes_back(event: Event) -> int:
    return event.bytes if event.name == COMBINE else 0
