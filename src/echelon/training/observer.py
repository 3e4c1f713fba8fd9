# SPDX-License-Identifier: Apache-2.0
"""What training tells whoever watches it: `telemetry` implements it, and training imports none.

An observer is named "module:function", because ranks are other processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from echelon.config.job import Job
from echelon.core.event import EventSink

if TYPE_CHECKING:
    import torch

    from echelon.parallel.expert import LayerLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSummary:
    """Sum up the routing of a global batch over all layers.

    `imbalance` is that of the worst layer: the load of its busiest expert over the mean.
    """

    assignments: int
    dropped: int
    aux_loss: float
    z_loss: float
    imbalance: float

    @property
    def dropped_share(self) -> float:
        """Return the part of all assignments that was dropped."""
        return self.dropped / self.assignments if self.assignments else 0.0

    @classmethod
    def from_rows(cls, rows: torch.Tensor) -> RoutingSummary:
        """Return the summary of the rows of all ranks."""
        assignments, dropped, aux_loss, z_loss = rows[:, :4].sum(0).tolist()
        return cls(
            assignments=int(assignments),
            dropped=int(dropped),
            aux_loss=aux_loss,
            z_loss=z_loss,
            imbalance=float(rows[:, 4].max()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """Say what one step did; the numbers are those of the whole run, the same on every rank.

    Where islands of local SGD train alone they are those of this rank's island, but for `tokens`.
    """

    step: int
    """Optimizer steps done."""
    loss: float
    """Mean loss over the counted tokens of the global batch."""
    tokens: int
    """Counted tokens of the global batch; with islands, their number times those of this one."""
    grad_norm: float
    """Norm of all gradients before clipping."""
    learning_rate: float
    """The learning rate of the step."""
    loss_scale: float
    """The factor of the loss in the backward of this step."""
    skipped: bool
    """Whether a gradient overflowed under it, so that no rank updated anything."""
    rank_waits_s: tuple[float, ...]
    """Seconds that each rank waited for others until its gradients were complete; a straggler is
    the one that waited least."""
    rank_used_bytes: tuple[int, ...]
    """Bytes of memory that each rank says it uses."""
    routing: RoutingSummary | None = None
    """Sums over the experts of the whole model; a dense model has none."""
    loads: Mapping[int, LayerLoad] = field(default_factory=dict[int, "LayerLoad"])
    """Loads of the layers of this rank; to an observer, of those of which it is the one to tell."""
    islands: tuple[int, ...] = ()
    """The islands of local SGD that met at its end, where some may be lost; else none."""
    step_s: float = 0.0
    """Seconds that this rank took, its batch read: known when all of the step is over."""


class Absence(Protocol):
    """What ranks missed of a run that went on without them."""

    def says(self) -> str:
        """Return it in words."""
        ...


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

    def noted(self, step: int, text: str) -> None:
        """Learn what else happened by the end of a step, in words."""
        ...

    def speaks(self, now: bool) -> None:
        """Learn whether this rank tells of the run: of islands that may be lost the first does."""
        ...

    def close(self) -> None:
        """Write out what is left; nothing follows."""
        ...


ObserverFactory = Callable[[Job, Path, int], RunObserver]
"""Build the observer of a rank: the job, the run directory, the rank."""
