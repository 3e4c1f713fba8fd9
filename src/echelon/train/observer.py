"""What training tells whoever watches it; `observe/` implements it, and training imports none.

An observer is named "module:function", because ranks are other processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from echelon.config.job import Job
from echelon.core.event import EventSink
from echelon.train.routing import RoutingSummary

if TYPE_CHECKING:
    from echelon.parallel.expert import LayerLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """Say what one step did; the numbers are those of the whole run, the same on every rank.

    `step` counts the optimizer steps done, `tokens` are the counted tokens of the global batch,
    `step_s` the seconds that this rank took, `rank_waits_s` those that each rank waited for others
    (a straggler is the one that waited least), `rank_used_bytes` the memory of each. `loss_scale`
    was the factor of the loss; a `skipped` step updated nothing, for a gradient overflowed.
    `routing` sums up the experts of the whole model (a dense model has none); `loads` are those of
    the layers of which this rank is the one to tell.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    step_s: float
    rank_waits_s: tuple[float, ...]
    rank_used_bytes: tuple[int, ...]
    loss_scale: float
    skipped: bool
    routing: RoutingSummary | None
    loads: Mapping[int, LayerLoad]


class RunObserver(Protocol):
    """Watch one rank of a run."""

    @property
    def sink(self) -> EventSink:
        """Where the events of this rank go."""
        ...

    def used_bytes(self) -> int:
        """Return the memory that this rank uses now."""
        ...

    def stepped(self, facts: StepFacts) -> None:
        """Learn that a step is done."""
        ...

    def validated(self, step: int, loss: float) -> None:
        """Learn the validation loss after `step` steps."""
        ...

    def saved(self, step: int, path: Path) -> None:
        """Learn that a checkpoint was committed."""
        ...

    def close(self) -> None:
        """Write out what is left; nothing follows."""
        ...


ObserverFactory = Callable[[Job, Path, int], RunObserver]
"""Build the observer of a rank: the job, the run directory, the rank."""
