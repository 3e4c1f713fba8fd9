# SPDX-License-Identifier: Apache-2.0
"""A module of any kind as each replica has it: the same tree, with tensors of its own.

The tree is copied for every pass, shallowly, so a replica has the modes, hooks and attributes that
the module has now; tensors are copied once a step. Replicas have leaves of their own for what is
trained, the primary too (an alias of each parameter), so hooks of parameters see one gradient: the
sum. What has several names (tied parameters, a module in two places) is one in a replica too.

The primary has the buffers of the module themselves: what it writes into them, or puts in their
place, stays. What other replicas change in theirs is lost when the step ends, as in PyTorch; and so
is every other attribute that a forward pass sets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from echelon.core.errors import ConfigError, Problem
from echelon.core.rulebook.module import THREADED_MODULE, THREADED_STEP
from echelon.parallel.threads.workers import num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaTensors:
    """Hold the parameters and buffers of one replica."""

    trained: Sequence[torch.Tensor]
    """Its leaf of each tensor that is trained, in the order of `trained_tensors`."""
    by_id: Mapping[int, torch.Tensor]
    """Its tensor in the place of each one of the module, by the id of that."""


def state_of(module: nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of a module, each once."""
    found = {id(one): one for one in (*module.parameters(), *module.buffers())}
    return list(found.values())


def trained_tensors(module: nn.Module) -> list[torch.Tensor]:
    """Return the parameters, and buffers if any, that require a gradient, each once."""
    return [one for one in state_of(module) if one.requires_grad]


class ModuleCopies:
    """Hold what the replicas of a module have in one step: copied when a replica first has rows."""

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        """Copy nothing yet; the module's tensors are those of now until the step has ended."""
        self._module, self._devices = module, devices
        self._found: list[ReplicaTensors] = []
        self._versions = self._versions_now()

    def _versions_now(self) -> list[tuple[int, int, int]]:
        return [
            (id(one), one.data_ptr(), 0 if one.is_inference() else one._version)
            for one in self._module.parameters()
        ]

    def require_unchanged(self) -> None:
        """Raise ConfigError where a parameter has changed since the step began."""
        if self._versions_now() != self._versions:
            message = "parameters have changed since the step began, and replicas have the old ones"
            ways = ("leave `with model.step():` before the optimizer's step",)
            raise ConfigError([THREADED_STEP.problem(message, suggestions=ways)])

    def extend(self, count: int) -> int:
        """Give parameters and buffers to the first `count` replicas; return the bytes copied now.

        Step 2 of seven.
        """
        sent = 0
        while len(self._found) < count:
            index = len(self._found)
            with torch.inference_mode(False), torch.no_grad():
                self._found.append(self._copied(index))
            sent += sum(map(num_bytes, state_of(self._module))) if index else 0
        return sent

    def _copied(self, index: int) -> ReplicaTensors:
        by_id: dict[int, torch.Tensor] = {}
        trained: list[torch.Tensor] = []
        parameters = {id(one) for one in self._module.parameters()}
        for one in state_of(self._module):
            here = one.detach()
            if index:
                here = one.detach().to(self._devices[index], copy=True, non_blocking=True)
            if id(one) in parameters:
                here = nn.Parameter(here, requires_grad=one.requires_grad)
            elif one.requires_grad:
                here.requires_grad_()
            elif not index:
                here = one
            by_id[id(one)] = here
            if one.requires_grad:
                trained.append(here)
        return ReplicaTensors(trained=trained, by_id=by_id)

    def trained(self, index: int) -> Sequence[torch.Tensor]:
        """Return the leaves of a replica, in the order of `trained_tensors`."""
        return self._found[index].trained

    def replica(self, index: int) -> list[nn.Module]:
        """Return the modules of a replica, the root first, whose tensors it has got."""
        by_id = self._found[index].by_id
        copies = {
            id(one): cast("nn.Module", one._replicate_for_data_parallel())  # type: ignore[operator]
            for one in self._module.modules()
        }
        for one in self._module.modules():
            here = copies[id(one)]
            for name, child in one._modules.items():
                here._modules[name] = None if child is None else copies[id(child)]
            for name, parameter in one._parameters.items():
                if parameter is None:
                    here.register_parameter(name, None)
                else:
                    setattr(here, name, by_id[id(parameter)])
            for name, buffer in one._buffers.items():
                if buffer is not None:
                    here._buffers[name] = by_id[id(buffer)]
        return list(copies.values())

    def keep_buffers(self, primary: Sequence[nn.Module]) -> None:
        """Put buffers that the primary replaced in this pass in the place of the module's."""
        by_id = self._found[0].by_id
        for one, here in zip(self._module.modules(), primary, strict=True):
            for name, buffer in list(one._buffers.items()):
                now = here._buffers.get(name)
                if now is not (None if buffer is None else by_id[id(buffer)]):
                    one._buffers[name] = None if now is None else now.detach()


def require_replicable(module: nn.Module, primary: torch.device) -> None:
    """Raise ConfigError with all that keeps a module from being copied for each replica."""
    problems = list(_problems(module, primary))
    if problems:
        raise ConfigError(problems)


def _problems(module: nn.Module, primary: torch.device) -> Iterator[Problem]:
    for name, one in module.named_modules():
        kind = _taken_in(one)
        if kind:
            message = f"{_called(name)} is {kind}"
            yield THREADED_MODULE.problem(message, suggestions=("the module itself, as it was",))
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            message, way = f"{name} has no shape yet", "run the module once, then ec.threaded"
        elif tensor.is_meta:
            message, way = f"{name} is on the meta device and has no values", "make it on a device"
        elif tensor.device != primary:
            message = f"{name} is on {tensor.device}, and replica 0 on {primary}"
            way = f"module.to({str(primary)!r})"
        else:
            continue
        yield THREADED_MODULE.problem(message, suggestions=(way,))


def _taken_in(module: nn.Module) -> str:
    """Return what has taken a module in, so that a copy of its tree would not compute alone."""
    kind = type(module).__name__
    if kind == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
        return "compiled by torch.compile, which traces one thread"
    if isinstance(module, torch.jit.ScriptModule):
        return "compiled by TorchScript"
    if kind in {"ThreadedModule", "DataParallel", "DistributedDataParallel"}:
        return f"a {kind} already"
    if kind.startswith("FSDP") or "fully_shard" in type(module).__module__:
        return "split over ranks by FSDP"
    return ""


def _called(name: str) -> str:
    return name or "the module"
