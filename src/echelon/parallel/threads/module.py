# SPDX-License-Identifier: Apache-2.0
"""Any module on threads of one process: the seven steps of `torch.nn.DataParallel`.

    1. scatter      each replica gets its rows of the arguments              each pass
    2. replicate    parameters and buffers, to replicas that have rows       once a step
    3. forward      in threads
    4. gather       outputs, onto the primary's device                       each pass
    5. loss         yours, over what was gathered
    6. backward     derivatives of outputs go to each replica, in threads    each backward pass
    7. sum          gradients are added onto the module's parameters         each backward pass

For autograd a pass is one function of the module's parameters and of the arguments that require
gradients. Its backward runs those of the replicas, whose graphs end in leaves of their own, and
returns the sums: hooks, `.grad` and `torch.autograd.grad` see what they see without threads.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch._C._autograd import _get_current_graph_task_keep_graph
from torch.autograd.function import once_differentiable

from echelon.core.errors import ConfigError, Problem
from echelon.core.event import EventSink, NoEvents
from echelon.core.rulebook.module import THREADED_ARGUMENT
from echelon.core.rules import did_you_mean
from echelon.parallel.threads.copies import (
    Arguments,
    ModuleCopies,
    Outputs,
    read_arguments,
    read_outputs,
    require_replicable,
    trained_tensors,
)
from echelon.parallel.threads.workers import ReplicaThreads, num_bytes, replica_devices
from echelon.parallel.transport.recorder import Recorder

Replicated = TypeVar("Replicated", bound=nn.Module)


class ThreadedModule(nn.Module, Generic[Replicated]):
    """Compute a module on replicas, each in its thread; the module itself is `module`.

    Its parameters, `state_dict` (under "module.") and modes are the module's. A forward pass is a
    step of its own, for which parameters are replicated; `step` holds several passes together.
    """

    def __init__(
        self,
        module: Replicated,
        devices: Sequence[torch.device],
        *,
        dim: int = 0,
        whole: Sequence[str] = (),
        sink: EventSink | None = None,
    ) -> None:
        """Replicate `module`, which is on the first of `devices`; ConfigError where that cannot be.

        Arguments are cut along `dim`, but for those named in `whole`; `sink` takes events.
        """
        super().__init__()
        require_replicable(module, devices[0])
        self.module = module
        self.devices, self.dim, self.whole = tuple(devices), dim, frozenset(whole)
        self._sink = sink or NoEvents()
        self._sent: Counter[str] = Counter()
        self._threads: ReplicaThreads | None = None
        self._step: ModuleCopies | None = None
        self._names = [
            one.name
            for one in inspect.signature(module.forward).parameters.values()
            if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
        ]

    @property
    def replicas(self) -> int:
        """Return how many replicas there are, the primary among them."""
        return len(self.devices)

    @property
    def sent(self) -> Mapping[str, int]:
        """Return the bytes that went through the primary since the last step began, by term.

        They are those of `step_bytes` in `cost/bytes/threads.py`: replicate, scatter, gather,
        seeds, gradients, input gradients.
        """
        return dict(self._sent)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Replicate once for all passes inside, between which no parameter may change."""
        if self._step is not None:
            raise RuntimeError("model.step() is not entered twice: its passes are one step")
        self._begin()
        self._step = ModuleCopies(self.module, self.devices)
        try:
            yield
        finally:
            self._step = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output for the whole batch, on the first device.

        What a replica raises is raised, with a note of which one it was; ConfigError where
        arguments cannot be cut or outputs not joined.
        """
        copies = self._step
        if copies is None:
            self._begin()
            copies = ModuleCopies(self.module, self.devices)
        copies.require_unchanged()
        arguments = read_arguments(
            args,
            kwargs,
            names=self._names,
            whole=self.whole,
            dim=self.dim,
            replicas=self.replicas,
        )
        one = _ReplicaPass(self, copies, arguments)
        if not torch.is_grad_enabled():
            outputs = one.forward()
            return outputs.of_all(one.gather(outputs))
        # Autograd calls a backward where some input has a gradient: the first one stands for what
        # is trained and is neither a parameter nor an argument.
        anchor = torch.zeros((), requires_grad=True, device=self.devices[0])
        inputs = [arguments.leaves[place] for place in arguments.wanting]
        gathered = _OnReplicas.apply(anchor, one, *trained_tensors(self.module), *inputs)
        return one.outputs.of_all(gathered)

    @property
    def threads(self) -> ReplicaThreads:
        """Return the threads, started where they are first used."""
        if self._threads is None:
            self._threads = ReplicaThreads(self.devices, Recorder(0, self._sink))
        return self._threads

    def record(self, kind: str, term: str, start: float, sent: int) -> None:
        """Count and write down what has gone through the primary since `start`."""
        self._sent[term] += sent
        self.threads.record(kind, term, start, sent)

    def close(self) -> None:
        """End the threads; the next pass starts new ones."""
        if self._threads is not None:
            self._threads.close()
            self._threads = None

    def _begin(self) -> None:
        self._sent.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Return what is copied or saved: all but the threads and the step under way."""
        return {**self.__dict__, "_threads": None, "_step": None}


class _ReplicaPass:
    """One forward pass of all replicas that have rows, and what its backward needs."""

    def __init__(self, owner: ThreadedModule[Any], copies: ModuleCopies, given: Arguments) -> None:
        self._owner, self._copies, self._given = owner, copies, given
        self._count = len(given.rows)
        self._leaves: list[dict[int, torch.Tensor]] = []
        self.outputs: Outputs
        self._done = False

    def forward(self) -> Outputs:
        """Return the outputs of the replicas: steps 1 to 3."""
        owner, clock = self._owner, self._owner.threads.recorder
        start = clock.now()
        owner.record("replicate", "replicate", start, self._copies.extend(self._count))
        start = clock.now()
        given = [self._scatter(index) for index in range(self._count)]
        owner.record("scatter", "scatter", start, self._given.bytes_elsewhere)
        replicas = [self._copies.replica(index) for index in range(self._count)]

        def run(index: int) -> Any:
            args, kwargs = self._given.of_replica(given[index])
            return replicas[index][0](*args, **kwargs)

        outputs = owner.threads.run("forward", run, self._count)
        self._copies.keep_buffers(replicas[0])
        return read_outputs(outputs, owner.dim)

    def _scatter(self, index: int) -> list[Any]:
        """Return the arguments of a replica, on its device; leaves where gradients are wanted."""
        device, leaves, found = self._owner.devices[index], dict[int, torch.Tensor](), list[Any]()
        wanting = set(self._given.wanting) if torch.is_grad_enabled() else set[int]()
        for place, leaf in enumerate(self._given.leaves):
            part = self._given.part(place, index)
            if not isinstance(leaf, torch.Tensor):
                found.append(part)
            elif place in wanting:
                # What a replica gets is no leaf, so it may be changed in place.
                leaves[place] = part.detach().requires_grad_()
                found.append(leaves[place].to(device, copy=True))
            else:
                found.append(part.to(device, non_blocking=True))
        self._leaves.append(leaves)
        return found

    def gather(self, outputs: Outputs) -> list[torch.Tensor]:
        """Return the outputs of all, on the primary's device: step 4."""
        start = self._owner.threads.recorder.now()
        joined = [outputs.joined(place, self._owner.devices[0]) for place in outputs.tensors]
        parts = [part for place in outputs.tensors for part in outputs.parts(place)[1:]]
        self._owner.record("gather", "gather", start, sum(map(num_bytes, parts)))
        return joined

    def backward(self, derivatives: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return the gradients of what is trained, then those of arguments: steps 6 and 7."""
        if self._done:
            raise RuntimeError(
                "the graphs of the replicas were freed by the first backward pass: say "
                "retain_graph=True there to go through them again"
            )
        keep = _get_current_graph_task_keep_graph()
        clock = self._owner.threads.recorder
        roots: list[list[torch.Tensor]] = [[] for _ in range(self._count)]
        seeds: list[list[torch.Tensor]] = [[] for _ in range(self._count)]
        start, sent = clock.now(), 0
        for place, derivative in zip(self.outputs.tensors, derivatives, strict=True):
            if derivative is None:
                continue
            parts = zip(self.outputs.parts(place), self.outputs.cut(place, derivative), strict=True)
            for index, (root, seed) in enumerate(parts):
                if root.requires_grad:
                    roots[index].append(root)
                    seeds[index].append(seed.to(root.device, root.dtype))
                    sent += num_bytes(seeds[index][-1]) if index else 0
        self._owner.record("scatter", "seeds", start, sent)

        def run(index: int) -> None:
            if roots[index]:
                torch.autograd.backward(roots[index], seeds[index], retain_graph=keep)

        self._owner.threads.run("backward", run, self._count)
        if not keep:
            self._done = True
            self.outputs = Outputs(leaves=[[]], spec=self.outputs.spec, dim=self.outputs.dim)
        return [*self._sum_trained(), *self._input_gradients()]

    def _sum_trained(self) -> list[torch.Tensor | None]:
        """Return the gradient of each tensor that is trained, added up in the order of replicas."""
        start, sent = self._owner.threads.recorder.now(), 0
        sums: list[torch.Tensor | None] = []
        for leaves in zip(*map(self._copies.trained, range(self._count)), strict=True):
            total = None
            for index, leaf in enumerate(leaves):
                gradient, leaf.grad = leaf.grad, None
                if gradient is not None:
                    sent += num_bytes(gradient) if index else 0
                    here = gradient.to(self._owner.devices[0])
                    total = here if total is None else total.add_(here)
            sums.append(total)
        self._owner.record("reduce", "gradients", start, sent)
        return sums

    def _input_gradients(self) -> Iterator[torch.Tensor | None]:
        """Yield the gradient of each argument: rows put together, or a sum where it was whole."""
        start, sent = self._owner.threads.recorder.now(), 0
        for place in self._given.wanting:
            leaves = [each[place] for each in self._leaves]
            found = [leaf.grad for leaf in leaves]
            for leaf in leaves:
                leaf.grad = None
            sent += sum(num_bytes(one) for one in found[1:] if one is not None)
            if all(one is None for one in found):
                yield None
                continue
            parts = [
                torch.zeros_like(leaf) if one is None else one
                for leaf, one in zip(leaves, found, strict=True)
            ]
            if place in self._given.cut:
                yield torch.cat(parts, self._given.dim)
            else:
                yield torch.stack(parts).sum(0)
        self._owner.record("gather", "input gradients", start, sent)


class _OnReplicas(torch.autograd.Function):
    """A pass of all replicas as one function, of what is trained and of arguments."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, one: _ReplicaPass, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the gathered tensors; those that no replica has a gradient for have none."""
        ctx.set_materialize_grads(False)
        ctx.one = one
        with torch.enable_grad():
            one.outputs = one.forward()
        joined = one.gather(one.outputs)
        ctx.mark_non_differentiable(
            *(
                tensor
                for place, tensor in zip(one.outputs.tensors, joined, strict=True)
                if not any(part.requires_grad for part in one.outputs.parts(place))
            )
        )
        return tuple(joined)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *derivatives: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Run the backward of every replica; return the sums of gradients."""
        return None, None, *ctx.one.backward(derivatives)


Place = str | int | torch.device
"""Where a replica is: a name ("cpu", "cuda:1"), the number of a GPU, or a device."""


def devices_of(
    module: nn.Module, replicas: int | None, devices: Sequence[Place] | None
) -> list[torch.device]:
    """Return where each replica is, the primary first; ConfigError where these are no such places.

    A GPU without a number is the current one.
    """
    if (replicas is None) == (devices is None):
        said = "neither is said" if replicas is None else "both are said"
        raise _refused("replicas", f"how many replicas, or where they are: {said}", "replicas=2")
    if devices is not None:
        return _listed(devices)
    if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 1:
        raise _refused("replicas", f"replicas = {replicas!r}", "replicas=2", "replicas=1")
    first = next((one.device for one in (*module.parameters(), *module.buffers())), None)
    found = replica_devices(_numbered(first or torch.device("cpu")), replicas)
    if found[0].type == "cuda" and replicas > torch.cuda.device_count():
        there = torch.cuda.device_count()
        raise _refused(
            "replicas",
            f"replicas = {replicas}, and this host has {there} GPUs",
            f"replicas={there}",
        )
    return found


def _listed(devices: Sequence[Place]) -> list[torch.device]:
    """Return the devices of a list: all of one type, each of which is there, no GPU twice."""
    if isinstance(devices, (str, int, torch.device)) or not devices:
        raise _refused(
            "devices", f"devices = {devices!r} is no list of devices", "devices=['cpu', 'cpu']"
        )
    found: list[torch.device] = []
    for one in devices:
        try:
            found.append(
                _numbered(torch.device("cuda", one) if type(one) is int else torch.device(one))
            )
        except (RuntimeError, TypeError) as error:
            told = str(error).partition("\n")[0]
            raise _refused(
                "devices", f"{one!r} is no device: {told}", "'cpu'", "'cuda:0'"
            ) from None
    problems = list(_misplaced(found))
    if problems:
        raise ConfigError(problems)
    return found


def _misplaced(devices: Sequence[torch.device]) -> Iterator[Problem]:
    def problem(message: str, *ways: str) -> Problem:
        return THREADED_ARGUMENT.problem(message, key="devices", suggestions=ways)

    kinds = sorted({one.type for one in devices})
    if len(kinds) > 1:
        yield problem(
            f"devices are of {len(kinds)} types ({', '.join(kinds)}): replicas compute alike",
            f"devices={[str(one) for one in devices if one.type == devices[0].type]}",
        )
    elif kinds not in (["cpu"], ["cuda"]):
        yield problem(f"devices are of the type {kinds[0]}", "'cpu'", "'cuda:0'")
    there = torch.cuda.device_count()
    gone = [str(one) for one in devices if one.type == "cuda" and (one.index or 0) >= there]
    if gone:
        yield problem(f"{', '.join(gone)}: this host has {there} GPUs")
    twice = sorted({str(one) for one in devices if one.type == "cuda" and devices.count(one) > 1})
    if twice:
        yield problem(f"{', '.join(twice)} twice: its replicas would wait for one another")


def _numbered(device: torch.device) -> torch.device:
    """Return a GPU with its number, and the CPU without one, as tensors have them."""
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type == "cuda" and device.index is None:
        index = torch.cuda.current_device() if torch.cuda.is_available() else 0
        return torch.device("cuda", index)
    return device


def require_cut(module: nn.Module, dim: int, whole: Sequence[str]) -> None:
    """Raise ConfigError where `dim` is no dim, or `whole` names no arguments of the forward."""
    if not isinstance(dim, int) or isinstance(dim, bool) or dim < 0:
        raise _refused("dim", f"dim = {dim!r}, and dims are counted from 0", "dim=0", "dim=1")
    if isinstance(whole, str):
        raise _refused("whole", f"whole = {whole!r} is no list of names", f"whole=[{whole!r}]")
    known = inspect.signature(module.forward).parameters
    if any(one.kind is one.VAR_KEYWORD for one in known.values()):
        return
    names = [name for name, one in known.items() if one.kind is not one.VAR_POSITIONAL]
    for name in whole:
        if name not in names:
            near = did_you_mean(name, names) or names
            message = (
                f"whole names {name!r}, which is no argument of {type(module).__name__}.forward"
            )
            raise _refused("whole", message, *near)


def _refused(key: str, message: str, *ways: str) -> ConfigError:
    return ConfigError([THREADED_ARGUMENT.problem(message, key=key, suggestions=ways)])
