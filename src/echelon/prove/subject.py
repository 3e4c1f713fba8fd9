"""The thing under proof: what the prover asks of a training engine, and nothing more.

A subject is named "module:function", for ranks are other processes; the function is a `Factory`.
The prover reads attributes only, so an engine needs no import from here: any object with the
attributes of a `StepReport` is one.

Shapes: B sequences of the whole global batch, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from echelon.core.attention_mask import DocumentStarts
from echelon.core.plan import Plan
from echelon.parallel.recorder import WaitMarks
from echelon.parallel.shards import Shard
from echelon.prove.routing_said import RoutingSaid


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """Hold a whole global batch; every rank is given all of it and takes its own rows.

    Data-parallel rank r (`dp_replicate` major, `dp_shard` minor), microbatch m of M, b sequences
    each, owns rows ``(r * M + m) * b`` to ``(r * M + m + 1) * b``. `sample_ids` names the rows. All
    context ranks of a data-parallel rank get the same rows; each takes its own positions of them.
    `documents` says where documents start in each row, where attention stays inside of them.
    """

    sample_ids: tuple[int, ...]
    inputs_BT: torch.Tensor
    labels_BT: torch.Tensor
    documents: DocumentStarts | None = None

    def microbatch(self, plan: Plan, dp_rank: int, microbatch: int) -> GlobalBatch:
        """Return the rows of one microbatch of one data-parallel rank."""
        size = plan.layout.microbatch_sequences
        start = (dp_rank * plan.num_microbatches + microbatch) * size
        rows = slice(start, start + size)
        return GlobalBatch(
            sample_ids=self.sample_ids[rows],
            inputs_BT=self.inputs_BT[rows],
            labels_BT=self.labels_BT[rows],
            documents=None if self.documents is None else self.documents[rows],
        )


class StepReport(Protocol):
    """What one rank says about one optimizer step (a frozen dataclass with these fields does)."""

    @property
    def loss(self) -> float:
        """Mean loss over the valid tokens of the global batch; the same on every rank."""
        ...

    @property
    def tokens(self) -> int:
        """Valid tokens (label not -100) of the global batch; the same on every rank."""
        ...

    @property
    def grad_norm(self) -> float:
        """L2 norm of the gradient of the whole model before clipping; the same on every rank."""
        ...

    @property
    def microbatch_losses(self) -> Mapping[tuple[int, int], tuple[float, int]]:
        """(dp rank, microbatch) -> (sum of token losses, valid tokens), those this rank computed.

        Context ranks each tell of their own positions.
        Empty on a rank that does not own the last pipeline stage.
        """
        ...

    @property
    def samples(self) -> Sequence[int]:
        """Ids of the samples that this rank worked on, in the order of its microbatches."""
        ...

    @property
    def layers(self) -> Sequence[int]:
        """Blocks that this rank ran forward, each named once."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Hold a `StepReport`; for subjects that may import the prover.

    An engine that writes its events down also says `bytes_sent` (per axis, in this step) and
    `actions` (the pipeline actions that it ran, in order, such as ``F0.3``); one that scales the
    loss says the `loss_scale` of this step's backward and whether the step was `skipped`, for
    gradients overflowed; one that can measure it says `bytes_held`, by the terms of
    `cost.bytes_held`, from the storages that are alive after the step; one whose model has experts
    says in `routing` where it sent its tokens. What a report does not have is not compared.
    """

    loss: float
    tokens: int
    grad_norm: float
    microbatch_losses: Mapping[tuple[int, int], tuple[float, int]]
    samples: Sequence[int]
    layers: Sequence[int]
    bytes_sent: Mapping[str, int] | None = None
    actions: Sequence[str] | None = None
    skipped: bool | None = None
    loss_scale: float | None = None
    bytes_held: Mapping[str, int] | None = None
    routing: RoutingSaid | None = None


class Subject(Protocol):
    """One rank of a model under training, built for a plan and seeded by it.

    Names are those of `core.parameters`; a tied head is `embedding.weight` and has no name of its
    own. A rank gives only what it holds, in as many rectangles as it needs (a slice of a flat
    bucket takes up to three of a matrix); a tensor that it holds nothing of is absent. Tensors may
    be views of live buffers: the prover copies them at once.

    A subject whose optimizer keeps a master copy may also have a method `masters`, which gives it
    as `parameters` gives the parameters: what was updated is then compared where it is precise,
    and every parameter must be the rounding of its master copy.
    """

    def step(self, batch: GlobalBatch, step: int) -> StepReport:
        """Run optimizer step `step` (from 0): all microbatches, reduction, clip, update."""
        ...

    def gradients(self) -> Mapping[str, Sequence[Shard]]:
        """Return the gradient of the mean loss in the last step: reduced, not yet clipped.

        The loss scale is divided out, in float32 at the least; of a step that was skipped nothing
        is asked.
        """
        ...

    def parameters(self) -> Mapping[str, Sequence[Shard]]:
        """Return the parameters as they are now (before the first step: the initial weights)."""
        ...


class RankPlace(Protocol):
    """What a factory may ask of its rank (`launch.rank.RankContext` is one).

    The default process group of torch.distributed is initialised over exactly the plan's ranks.
    """

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        ...

    @property
    def progress(self) -> WaitMarks:
        """Whom to tell of waits for other ranks, so that a hang is told with where it is."""
        ...


Factory = Callable[[RankPlace, Plan], Subject]
"""Build this rank's part of the model, initialised from `plan.mathematics.seed`."""
