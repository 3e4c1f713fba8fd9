"""Two steps of data parallelism on four ranks, by a loop over a module of six weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from echelon.api.parallelizing import parallelize
from echelon.core.event import EventList
from echelon.core.plan import Collectives, Optimizer, Plan
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from echelon.parallel.transport import collectives
from echelon.parallel.transport.algorithms import Step
from echelon.parallel.transport.collectives import Group, Pending
from echelon.parallel.transport.messages import GlooPeers
from echelon.training.subject import rank_batches
from tests.parallel.layouts import plan_of
from tests.parallel.one_device import Rows, make_rows

RANKS, EACH, STEPS = 4, 8, 2
Entry = dict[str, Any]


def plan_of_run() -> Plan:
    """Return the plan: four replicas, a microbatch of eight samples each, buckets of two weights.

    So small a bucket holds one matrix, and the sum of one starts while backward goes on. Sums are
    made of messages around a ring, so that each of them can be noted.
    """
    plain = Optimizer(
        kind="sgd", learning_rate=1 / 16, momentum=0.0, weight_decay=0.0, clip_norm=None
    )
    plan = plan_of(
        dp=RANKS, microbatches=1, microbatch_sequences=EACH, bucket_bytes=16, optimizer=plain
    )
    ring = replace(plan.layout, collectives=Collectives(algorithm="ring"))
    return replace(plan, layout=ring)


class Small(nn.Module):
    """Two linear layers without biases: four weights, then two."""

    def __init__(self, rank: int) -> None:
        """Start with whole numbers, other ones on each rank: those of rank 0 count."""
        super().__init__()
        self.hidden = nn.Linear(2, 2, bias=False, dtype=torch.float64)
        self.output = nn.Linear(2, 1, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.hidden.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]) + rank)
            self.output.weight.copy_(torch.tensor([[1.0, 1.0]]) + rank)

    def forward(self, x_BI: torch.Tensor) -> torch.Tensor:
        """Return [B, 1]."""
        return self.output(self.hidden(x_BI))


def inputs_of(samples: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [B, 2] and what is to be learned of them [B, 1]: 2 a - b."""
    pairs = [(float(3 * one % 5 - 2), float(7 * one % 4 - 1)) for one in samples]
    wanted = [[2 * a - b] for a, b in pairs]
    return torch.tensor(pairs, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64)


def samples_of(plan: Plan, rank: int, step: int) -> list[int]:
    """Return the samples of a rank as the engine deals a global batch that lies in order."""
    size = plan.mathematics.global_sequences
    ids = tuple(range(step * size, (step + 1) * size))
    rows: Rows = replace(make_rows(plan, step), sample_ids=ids)
    return [int(i) for one in rank_batches(plan, rows, rank, step) for i in one.sample_ids_B]


class LoggedSum:
    """A sum under way: what it gave is noted when it is waited for."""

    def __init__(self, pending: Pending, name: str, tensor: torch.Tensor, log: list[Entry]) -> None:
        """Hold the sum of `tensor`."""
        self._pending, self._name, self._tensor, self._log = pending, name, tensor, log
        self._ended = False

    def done(self) -> bool:
        """Return whether it is known to be over."""
        return self._pending.done()

    def wait(self) -> None:
        """Return when the sum is there."""
        self._pending.wait()
        if not self._ended:
            self._ended = True
            self._log.append({"kind": "summed", "name": self._name, "values": _list(self._tensor)})


class LoggedPeers:
    """The other members of a ring, as its steps see them: to whom messages go is noted."""

    def __init__(self, peers: GlooPeers, sent_to: list[int]) -> None:
        """Note in `sent_to`."""
        self._peers, self._sent_to = peers, sent_to

    def send(self, tensor: torch.Tensor, member: int) -> Any:
        """Start to send to the member at `member`."""
        self._sent_to.append(member)
        return self._peers.send(tensor, member)

    def receive(self, tensor: torch.Tensor, member: int) -> Any:
        """Start to receive from the member at `member`."""
        return self._peers.receive(tensor, member)


@contextmanager
def logged_sums(log: list[Entry], messages: list[list[int]]) -> Iterator[None]:
    """Note each sum of gradients: when it starts, of what, what it gives, and its messages.

    The messages of each sum are those of a thread, which runs sums in the order of their start.
    """
    all_reduce, run_steps = Group.all_reduce, collectives.run_steps

    def logged(group: Group, tensor: torch.Tensor, *, name: str, **how: Any) -> Any:
        if not name.startswith("gradients."):
            return all_reduce(group, tensor, name=name, **how)
        log.append({"kind": "all_reduce", "name": name, "values": _list(tensor)})
        return LoggedSum(all_reduce(group, tensor, name=name, **how), name, tensor, log)

    def logged_steps(tensor: torch.Tensor, steps: tuple[Step, ...], peers: Any) -> None:
        adds = any(step.adds for step in steps)
        if adds:
            messages.append([])
            peers = LoggedPeers(peers, messages[-1])
        run_steps(tensor, steps, peers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "all_reduce", logged)
        patch.setattr(collectives, "run_steps", logged_steps)
        yield


def train(context: RankContext, plan: Plan) -> dict[str, Any]:
    """Take the steps, and note what this rank does in its order."""
    model, events = Small(context.rank), EventList()
    given = _weights(model)
    model, optimizer = parallelize(model, plan, learning_rate="own", events=events)
    names = {id(one): name for name, one in model.named_parameters()}
    buckets = {f"gradients.{one.name}": list(one.plan.names) for one in optimizer.module.buckets}
    start, steps = _weights(model), list[dict[str, Any]]()
    passes = optimizer.module.passes
    told, log = passes.on_gradient, list[Entry]()

    def gradient_came(parameter: torch.Tensor) -> None:
        log.append({"kind": "gradient", "name": names[id(parameter)]})
        told(parameter)

    passes.on_gradient = gradient_came
    for step in range(STEPS):
        log.clear()
        events.events.clear()
        samples = samples_of(plan, context.rank, step)
        x_BI, wanted_BO = inputs_of(samples)
        log.append({"kind": "load"})
        messages: list[list[int]] = []
        with logged_sums(log, messages):
            loss = 0.5 * (model(x_BI) - wanted_BO).square().mean()
            log.append({"kind": "forward"})
            loss.backward()
            log.append({"kind": "backward"})
            optimizer.step()
        log.append({"kind": "update"})
        sent = {e.name: e.bytes for e in events.events if e.name in buckets}
        steps.append(
            {
                "samples": samples,
                "loss": float(loss),
                "log": list(log),
                "sent": sent,
                "messages": messages,
                "weights": _weights(model),
            }
        )
    optimizer.close()
    return {
        "given": given,
        "start": start,
        "buckets": buckets,
        "steps": steps,
        "alone": on_one_device(start, range(RANKS * EACH)),
    }


def on_one_device(weights: Mapping[str, Sequence[float]], samples: Sequence[int]) -> Entry:
    """Return loss and gradients of all samples of a step, by plain autograd on this rank alone."""
    model = Small(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.tensor(weights[name], dtype=torch.float64).view_as(parameter))
    x_BI, wanted_BO = inputs_of(samples)
    loss = 0.5 * (model(x_BI) - wanted_BO).square().mean()
    loss.backward()
    named = dict(model.named_parameters())
    gradients = {name: _list(one.grad) for name, one in named.items() if one.grad is not None}
    return {"loss": float(loss), "gradients": gradients}


def _weights(model: nn.Module) -> dict[str, list[float]]:
    return {name: _list(one.detach()) for name, one in model.named_parameters()}


def _list(tensor: torch.Tensor) -> list[float]:
    return [float(x) for x in tensor.reshape(-1).tolist()]


def record_data_parallel(pool: RankPool) -> dict[str, Any]:
    """Return what each of four ranks did in two steps, as plain values."""
    plan = plan_of_run()
    ranks = pool.run(f"{__name__}:{train.__name__}", plan, world_size=RANKS)
    return {"learning_rate": plan.mathematics.optimizer.learning_rate, "ranks": ranks}
