# SPDX-License-Identifier: Apache-2.0
"""One process applies the gradients of an asynchronous run in the order that its servers recorded.

A gradient of worker w in step c is computed from the versions that it had read of each server's
ranges, put together. Server s applies it to its ranges, at its place in the order of s, with

    g    = W x the part of w in the gradient of the mean loss of step c
    clip = min(1, clip_norm / |g|), of the whole g
    rate = rate(c) / (1 + version - read)^damping

With a bound of 0 the gradients of all workers in a step are one update: their sum, without the W.
Nothing here is shared with the engine but the model itself, the learning rate over steps, and what
the oracle shares; the update is the oracle's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from echelon.core.choices.updates import AppliedGradient
from echelon.core.parameters import parameters
from echelon.core.plan import Plan
from echelon.proof.oracle.batches import global_batch
from echelon.proof.oracle.optimizers import (
    OptimizerState,
    clip_scale,
    global_norm,
    learning_rate,
    update,
)
from echelon.proof.oracle.oracle import (
    build_decoder,
    initial_parameters,
    sums_by_microbatch,
    token_losses,
)
from echelon.proof.replays.records import AsynchronousRank

Tensors = Mapping[str, torch.Tensor]
WorkerStep = tuple[int, int]
"""A worker, and one of its steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """Say what a replay does otherwise; the right one does nothing so."""

    name: str = ""
    """The factor that it is told under."""
    says: str = ""
    """What it is, in words."""
    server: int | None = None
    """The server that makes it; None for all."""
    repeats: int = 1
    """How often each update is made."""
    undamped: bool = False
    """Whether a stale gradient is applied at the rate of a fresh one."""
    earlier: int = 0
    """How many of its pulls before the last a worker computes from."""
    factor: float = 1.0
    """What each gradient is multiplied by."""
    weights: Callable[[int, int], float] | None = None
    """What the gradient of (worker, number of workers) is multiplied by in a sum."""

    def of(self, server: int) -> bool:
        """Return whether a server makes it."""
        return self.server is None or self.server == server


RIGHT = Mistake()


class OrderProblem(Exception):
    """Say that no order of updates fits what was read; never seen by users."""


@dataclass(slots=True, eq=False)
class _Server:
    """The ranges of one server, in every version."""

    order: Sequence[Sequence[AppliedGradient]]
    """The gradients of each update."""
    owned: Tensors
    """Which elements are in its ranges."""
    versions: list[dict[str, torch.Tensor]]
    states: dict[str, OptimizerState]

    @property
    def next(self) -> Sequence[AppliedGradient] | None:
        """Return the gradients of the update that comes next."""
        done = len(self.versions) - 1
        return self.order[done] if done < len(self.order) else None


@dataclass(slots=True)
class Replay:
    """Replay the recorded order of `ranks` under `plan`."""

    plan: Plan
    ranks: Sequence[AsynchronousRank]
    mistake: Mistake = RIGHT
    losses: dict[WorkerStep, float] = field(default_factory=dict[WorkerStep, float])
    """Sum of the losses of the tokens of a worker in a step."""
    _gradients: dict[WorkerStep, Tensors] = field(default_factory=dict[WorkerStep, Tensors])
    _all: list[_Server] = field(default_factory=list[_Server])

    def final(self) -> list[dict[str, torch.Tensor]]:
        """Return the parameters of each server after its last update: its ranges are those.

        OrderProblem where no order of updates fits what was read: a version that was not there yet.
        """
        servers = self._servers()
        reads = _reads(servers)
        while any(server.next is not None for server in servers):
            ready = next(
                (one for one in servers if one.next is not None and self._is_ready(one, reads)),
                None,
            )
            if ready is None:
                raise OrderProblem("a gradient was read from a version that comes after it")
            self._advance(servers, ready, reads)
        return [server.versions[-1] for server in servers]

    def _servers(self) -> list[_Server]:
        first = {name: value.double() for name, value in initial_parameters(self.plan).items()}
        found: list[_Server] = []
        for rank in self.plan.mesh.server_ranks:
            said = self.ranks[rank]
            owned = {n: torch.zeros(v.shape, dtype=torch.bool) for n, v in first.items()}
            for piece in said.pieces:
                owned[piece.name][piece.region] = True
            found.append(
                _Server(
                    order=_updates(said.applied),
                    owned=owned,
                    versions=[dict(first)],
                    states={name: OptimizerState() for name in first},
                )
            )
        self._all = found
        return found

    def _is_ready(self, server: _Server, reads: Mapping[WorkerStep, Sequence[int]]) -> bool:
        assert server.next is not None
        return all(
            len(other.versions) > read
            for one in server.next
            for other, read in zip(self._all, reads[one.worker, one.step], strict=True)
        )

    def _advance(
        self,
        servers: Sequence[_Server],
        server: _Server,
        reads: Mapping[WorkerStep, Sequence[int]],
    ) -> None:
        """Make the next update of a server."""
        gradients = server.next
        assert gradients is not None
        number, plan = servers.index(server), self.plan
        optimizer, workers = plan.mathematics.optimizer, plan.mesh.num_workers
        mistake = self.mistake if self.mistake.of(number) else RIGHT
        parts = [self._gradient(servers, one, reads) for one in gradients]
        weights = [mistake.factor] * len(parts)
        if mistake.weights is not None:
            weights = [mistake.weights(one.worker, workers) for one in gradients]
        whole = {
            name: sum_of([w * part[name] for w, part in zip(weights, parts, strict=True)])
            for name in parts[0]
        }
        clip = clip_scale(global_norm(whole), optimizer.clip_norm)
        staleness = max(one.version - one.read for one in gradients)
        rate = learning_rate(optimizer, gradients[-1].step)
        if not mistake.undamped:
            rate /= (1.0 + staleness) ** plan.mathematics.updates.damping
        values = dict(server.versions[-1])
        specs = {spec.name: spec for spec in parameters(plan.model)}
        for _ in range(mistake.repeats):
            for name, value in values.items():
                done = update(
                    specs[name], value, whole[name] * clip, server.states[name], optimizer, rate
                )
                values[name] = value + done.total
        server.versions.append(values)

    def _gradient(
        self,
        servers: Sequence[_Server],
        one: AppliedGradient,
        reads: Mapping[WorkerStep, Sequence[int]],
    ) -> Tensors:
        key = (one.worker, one.step)
        if key in self._gradients:
            return self._gradients[key]
        before = max(0, one.step - self.mistake.earlier)
        read = reads[one.worker, before]
        values = dict(servers[0].versions[read[0]])
        for server, version in zip(servers[1:], read[1:], strict=True):
            for name, value in server.versions[version].items():
                values[name] = torch.where(server.owned[name], value, values[name])
        plan, batch = self.plan, global_batch(self.plan, one.step)
        model = build_decoder(plan, values)
        sums = sums_by_microbatch(plan, batch, token_losses(plan, model, batch, one.step))
        tokens = sum(count for _, count in sums.values())
        mine = torch.stack([total for (w, _), (total, _) in sums.items() if w == one.worker]).sum()
        each = plan.mathematics.updates.applies_each
        (mine * ((plan.mesh.num_workers if each else 1) / tokens)).backward()
        found = {
            name: parameter.grad.double()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        self.losses[key], self._gradients[key] = float(mine.detach()), found
        return found


def _updates(applied: Sequence[AppliedGradient]) -> list[list[AppliedGradient]]:
    """Return the gradients of each update, in order."""
    found: dict[int, list[AppliedGradient]] = {}
    for one in applied:
        found.setdefault(one.version, []).append(one)
    return [found[version] for version in sorted(found)]


def _reads(servers: Sequence[_Server]) -> dict[WorkerStep, list[int]]:
    """Return the version of each server that each gradient was computed from."""
    found: dict[WorkerStep, list[int]] = {}
    for number, server in enumerate(servers):
        for one in (one for together in server.order for one in together):
            found.setdefault((one.worker, one.step), [0] * len(servers))[number] = one.read
    return found


def sum_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of tensors."""
    return torch.stack(list(tensors)).sum(0)
