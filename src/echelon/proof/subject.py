# SPDX-License-Identifier: Apache-2.0
"""The thing under proof: what the prover asks of a training engine, and nothing more.

A subject is named "module:function", for ranks are other processes; the function is a `Factory`.
The prover reads attributes only, so an engine needs no import from here: any object with the
attributes of a `StepRecord` is one, and what it says of its experts with those of a
`ReportedRouting`.

Shapes: B sequences of the whole global batch, T positions, n tokens that a rank routed, E experts,
K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch

from echelon.core.attention_mask import DocumentStarts
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.parallel.completion.completion import Completion
from echelon.parallel.storage.weights import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedRoute:
    """Say where one layer sent the rows of a microbatch that one rank routed.

    `tokens` has n numbers (sample id x sequence length + position), `chosen` [n, K] the experts of
    each, `kept` [n, K] whether they had room.
    """

    layer: int
    microbatch: int
    tokens: Sequence[int]
    chosen: Sequence[Sequence[int]]
    kept: Sequence[Sequence[bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedLoad:
    """Say how a layer routed the global batch: assignments by expert (before drops), losses."""

    counts: Sequence[int]
    dropped: int
    aux_loss: float
    z_loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedRoutingSummary:
    """Sum up the routing of all layers; `imbalance` is that of the worst one."""

    assignments: int
    dropped: int
    aux_loss: float
    z_loss: float
    imbalance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedRouting:
    """Hold all that a rank says of the routing of a step.

    `routes` are those of its own rows; `loads` those of its layers over the whole global batch;
    `summary` that of the model. `biases` and `shares` (of the loads), [E] by layer, are those that
    the next step begins with.
    """

    routes: Sequence[ReportedRoute]
    loads: Mapping[int, ReportedLoad]
    summary: ReportedRoutingSummary
    biases: Mapping[int, Sequence[float]]
    shares: Mapping[int, Sequence[float]]

    @classmethod
    def from_report(cls, report: Any) -> ReportedRouting | None:
        """Return a copy of what a report says; nothing where it says nothing."""
        return report and cls(
            routes=[_copied(ReportedRoute, one) for one in report.routes],
            loads={int(i): _copied(ReportedLoad, load) for i, load in report.loads.items()},
            summary=_copied(ReportedRoutingSummary, report.summary),
            biases=_vectors(report.biases),
            shares=_vectors(report.shares),
        )

    @classmethod
    def from_json(cls, table: Mapping[str, Any] | None) -> ReportedRouting | None:
        """Return what was written with `dataclasses.asdict` as JSON."""
        if table is None:
            return None
        return cls(
            routes=[ReportedRoute(**route) for route in table["routes"]],
            loads={int(layer): ReportedLoad(**load) for layer, load in table["loads"].items()},
            summary=ReportedRoutingSummary(**table["summary"]),
            biases=_vectors(table["biases"]),
            shares=_vectors(table["shares"]),
        )


def _copied(kind: Any, report: Any) -> Any:
    """Return a record of what a report says, in plain numbers: an engine may say it in arrays."""
    return kind(**{field.name: _plain(getattr(report, field.name)) for field in fields(kind)})


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_plain(one) for one in value] if isinstance(value, Sequence) else value


def _vectors(report: Mapping[Any, Sequence[float]]) -> dict[int, list[float]]:
    return {int(layer): [float(one) for one in vector] for layer, vector in report.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofBatch:
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

    def microbatch(self, plan: Plan, dp_rank: int, microbatch: int) -> ProofBatch:
        """Return the rows of one microbatch of one data-parallel rank."""
        size = plan.layout.microbatch_sequences
        start = (dp_rank * plan.num_microbatches + microbatch) * size
        return self.rows(slice(start, start + size))

    def rows(self, rows: slice) -> ProofBatch:
        """Return some of the rows."""
        return ProofBatch(
            sample_ids=self.sample_ids[rows],
            inputs_BT=self.inputs_BT[rows],
            labels_BT=self.labels_BT[rows],
            documents=None if self.documents is None else self.documents[rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Say what one rank did in one optimizer step; what is None is not compared."""

    loss: float
    """Mean loss over the valid tokens of the global batch; the same on every rank."""
    tokens: int
    """Valid tokens (label not -100) of the global batch; the same on every rank."""
    grad_norm: float
    """L2 norm of the gradient of the whole model before clipping; the same on every rank."""
    microbatch_losses: Mapping[tuple[int, int], tuple[float, int]]
    """(data rank, microbatch) -> (sum of token losses, valid tokens), those this rank computed:
    context ranks each of their own positions, none where the last stage is elsewhere."""
    samples: Sequence[int]
    """Ids of the samples that this rank worked on, in the order of its microbatches."""
    layers: Sequence[int]
    """Blocks that this rank ran forward, each named once."""
    bytes_sent: Mapping[str, int] | None = None
    """Bytes sent in this step, by axis."""
    bytes_far: Mapping[str, int] | None = None
    """Bytes of them that went to ranks on other nodes, by axis."""
    actions: Sequence[str] | None = None
    """The pipeline actions that it ran, in order, such as `F0.3`."""
    skipped: bool | None = None
    """Whether the step changed nothing, for gradients overflowed."""
    loss_scale: float | None = None
    """The scale of the loss in this step's backward."""
    bytes_held: Mapping[str, int] | None = None
    """Bytes held by the terms of `cost/bytes/held.py`, from the storages that are alive after the
    step."""
    routing: ReportedRouting | None = None
    """Where tokens were sent."""


class ReportedActivation(Protocol):
    """What passed between two parts of the model on one rank, a row of W numbers for each token.

    Names are those of `models/decoder.py`, and "layers.3.scores" and "layers.3.gates", [n, E],
    of a router: what it chooses by, and the weights, each at its expert.
    """

    @property
    def name(self) -> str:
        """The boundary."""
        ...

    @property
    def gradient(self) -> bool:
        """Whether it is the gradient of the mean loss there, without the loss scale."""
        ...

    @property
    def recomputed(self) -> bool:
        """Whether it passed once more, in backward."""
        ...

    @property
    def tokens_n(self) -> torch.Tensor:
        """Numbers of the tokens: sample id x sequence length + position."""
        ...

    @property
    def values_nW(self) -> torch.Tensor:
        """What passed."""
        ...


class Subject(Protocol):
    """One rank of a model under training, built for a plan and seeded by it.

    Names are those of `core.parameters`; a tied head is `embedding.weight` and has no name of its
    own. A rank gives only what it holds, in as many rectangles as it needs (a slice of a flat
    bucket takes up to three of a matrix); a tensor that it holds nothing of is absent. Tensors may
    be views of live buffers: the prover copies them at once.

    A subject whose optimizer keeps a master copy may also have a method `masters`, which gives it
    as `parameters` gives the parameters: what was updated is then compared where it is precise,
    and every parameter must be the rounding of its master copy. One that has a method
    `activations`, which gives each `ReportedActivation` of the last step, is told between which
    parts of the model a forward pass goes wrong. One of islands of local SGD has a method `outer`,
    which gives the outer parameters and, if there is one, the outer momentum, each as `parameters`
    gives those, as "outer.parameters" and "outer.momentum"; all else that it says is of its island.
    """

    def step(self, batch: ProofBatch, step: int) -> Any:
        """Run optimizer step `step` (from 0): all microbatches, reduction, clip, update.

        Return any object with the attributes of a `StepRecord`; those with a default may be absent.
        """
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


Factory = Callable[[RankContext, Plan], Subject]
"""Build this rank's part of the model, initialised from `plan.mathematics.seed`.

The default process group of torch.distributed is initialised over exactly the plan's ranks.
"""

LateFactory = Callable[[RankContext, Plan, Completion], Subject]
"""Build it with operations that complete as the third argument says."""
