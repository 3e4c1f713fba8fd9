# SPDX-License-Identifier: Apache-2.0
"""Identity of data: which parameters, gradients or activations a tensor holds.

The name of an operation is the data that the engine means to send; its tensor is the data that it
sends. The storage of the tensor belongs to a bucket, or an action has just made it. A copy has the
identity of its source. Rehearsed groups write the identity of each operation into the log, and
report names that differ from their tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from echelon.parallel.offload.host_memory import storage_key
from echelon.parallel.pipeline import PipelineExecutor
from echelon.parallel.storage.buckets import Bucket
from echelon.rehearsal.memory import wrapped
from echelon.rehearsal.order import OTHER_DATA
from echelon.schedule.action import Action
from echelon.schedule.messages import Payload, message_name

Tell = Callable[[str, str], None]
"""Called with a broken rule, and a sentence about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataName:
    """The data of a tensor by name: the same on every rank that holds it."""

    text: str
    """Parameters from the first to the last one of a bucket, or the name of a message."""
    offset: int = 0
    """The first element, counted from the start of the bucket."""
    bucket: str = ""
    """The bucket of this rank; "" of an activation or its gradient."""

    def __str__(self) -> str:
        """Return it as users read it."""
        return f"{self.text}, from element {self.offset:,}" if self.bucket else self.text


@dataclass(frozen=True, slots=True)
class _Copy:
    """The storage of a copy, and the storage of its source."""

    storage: weakref.ref[Any]
    source: weakref.ref[Any]
    first: int
    """The first element, counted in the storage of the source."""


class DataNames:
    """The data of the tensors of one rank."""

    def __init__(self, tell: Tell) -> None:
        """Know no tensor; call `tell` for names that differ from their data."""
        self._tell = tell
        self._buckets: Sequence[Bucket] = ()
        self._messages: dict[int, tuple[weakref.ref[Any], str]] = {}
        self._copies: dict[int, _Copy] = {}
        self._running: Action | None = None

    def follow(self, buckets: Sequence[Bucket]) -> None:
        """Know parameters and gradients by their buckets, whose memory comes and goes."""
        self._buckets = buckets

    def is_message(self, tensor: torch.Tensor, name: str) -> None:
        """Note the message that an action made or that is received; a storage is one message."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        end = weakref.ref(storage, lambda _: self._messages.pop(key, None))
        self._messages[key] = (end, name)

    def copied(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Note that a new tensor has the elements of its source."""
        storage = target.untyped_storage()
        key = storage._cdata
        if source.is_contiguous() and key != storage_key(source):
            self._copies[key] = _Copy(
                weakref.ref(storage, lambda _: self._copies.pop(key, None)),
                weakref.ref(source.untyped_storage()),
                int(source.storage_offset()),
            )

    def of(self, tensor: torch.Tensor, called: str) -> DataName | None:
        """Return the data of a tensor of the operation `called` so; None if unknown."""
        storage, element = tensor.untyped_storage(), int(tensor.storage_offset())
        while (copy := self._copies.get(storage._cdata)) is not None:
            storage, element = copy.source(), copy.first + element
            if storage is None:
                return None
        message = self._messages.get(storage._cdata)
        if message is not None:
            return DataName(text=message[1])
        last = called.rpartition(".")[2]
        if not last.startswith(("bucket", "tied")):
            return None
        # Nearly always it is the bucket of that name.
        for bucket in sorted(self._buckets, key=lambda bucket: bucket.name != last):
            for part, flat, first in _flats(bucket):
                if storage_key(flat) == storage._cdata:
                    return DataName(
                        text=f"{part} of {_range_of(bucket)}",
                        offset=first + element - int(flat.storage_offset()),
                        bucket=bucket.name,
                    )
        return None

    def named(self, tensor: torch.Tensor, called: str, where: str) -> DataName | None:
        """Return the data of an operation's tensor; report a name of other data."""
        data, last = self.of(tensor, called), called.rpartition(".")[2]
        if data is None:
            return None
        # Sums of a tied embedding have a name for both ends, whose buckets have other numbers.
        is_other = data.bucket not in (last, "") and last != "tied"
        # A ring of tensor ranks may send the message itself on, under its own name.
        if is_other or (not data.bucket and data.text != called and _is_message(called)):
            of = f"{data.bucket}: {data}" if data.bucket else str(data)
            self._tell(OTHER_DATA, f"{called} at {where} has the data of {of}")
        return data

    def is_slice(self, full: torch.Tensor, part: torch.Tensor, called: str, first: int) -> None:
        """Report the slice of a rank if it is not at element `first` of the full tensor."""
        name, data = self.of(full, called), self.of(part, called)
        if name is None or data is None:
            return
        if data.text != name.text or data.offset != name.offset + first:
            place = f"{name.text}, from element {name.offset + first:,}"
            self._tell(OTHER_DATA, f"the slice of {called} is {data}, and its place {place}")

    def following(self, executor: PipelineExecutor) -> AbstractContextManager[None]:
        """Note the messages that actions of a pipeline make; report inputs that are others."""

        def run_forward(forward: Any, state: Any, action: Action, x_ND: Any, *args: Any) -> Any:
            self._used(action, x_ND, Payload.ACTIVATION, -1)
            graphs = [*state.outputs.values()]
            out_ND = self._made(action, forward(state, action, x_ND, *args), Payload.ACTIVATION, 1)
            for graph in state.outputs.values():
                if not any(graph is known for known in graphs):
                    node = graph.grad_fn if isinstance(graph, torch.Tensor) else graph.node
                    if node is not None:
                        node.register_prehook(partial(self._runs_graph, action))
            return out_ND

        def run_backward(backward: Any, state: Any, action: Action, dy_ND: Any) -> Any:
            self._used(action, dy_ND, Payload.GRADIENT, 1)
            self._running = action
            dx_ND = backward(state, action, dy_ND)
            self._running = None
            return self._made(action, dx_ND, Payload.GRADIENT, -1)

        return wrapped([(executor, "_forward", run_forward), (executor, "_backward", run_backward)])

    def _runs_graph(self, made_by: Action, _: object) -> None:
        """Compare the forward action of a graph with the backward action that runs it."""
        action = self._running
        if action is None:
            return
        if (action.stage, action.microbatch) != (made_by.stage, made_by.microbatch):
            self._tell(OTHER_DATA, f"{action} runs the graph that {made_by} has left")

    def _used(self, action: Action, x_ND: Any, payload: Payload, ahead: int) -> None:
        """Compare the input that an action is given with the input that it needs."""
        if x_ND is None:
            return
        stage = action.stage
        name = message_name(payload, action.microbatch, stage + ahead, stage)
        data = self.of(x_ND, "")
        if data is not None and data.text != name:
            self._tell(OTHER_DATA, f"{action} computes on {data}, and its input is {name}")

    def _made(self, action: Action, out_ND: Any, payload: Payload, ahead: int) -> Any:
        if out_ND is not None:
            stage = action.stage
            self.is_message(out_ND, message_name(payload, action.microbatch, stage, stage + ahead))
        return out_ND


def _flats(bucket: Bucket) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Yield the flat tensors of a bucket: their kind of data, and their first element in it."""
    yield "gradients", bucket.gradients, 0
    yield "gradients", bucket.gradient_slice, bucket.own.start
    yield "parameters", bucket.values, 0
    yield "parameters", bucket.value_slice, bucket.own.start
    if bucket.fp8 is not None:
        yield "parameters", bucket.fp8.codes, bucket.own.start
    if bucket.int8 is not None:
        yield "parameters in int8", bucket.int8.whole, 0


def _is_message(called: str) -> bool:
    """True if an operation is called as a message between stages."""
    return called.split(" ", maxsplit=1)[0] in {payload.value for payload in Payload}


def _range_of(bucket: Bucket) -> str:
    first, last = bucket.slots[0].spec.name, bucket.slots[-1].spec.name
    return first if first == last else f"{first} to {last}"
