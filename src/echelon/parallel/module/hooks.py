# SPDX-License-Identifier: Apache-2.0
"""Which unit of a module is used when: seen by hooks, noted in the first step, followed after it.

The first step gathers everything at once and notes the forward and the backward of each unit. The
ranks compare their notes; units whose use is regular come and go one by one from then on, and the
others stay whole for each pass. A rank that leaves a unit out takes part in its gathers in its
turn, so a branch that only some ranks take never pairs wrong gathers.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from echelon.core.errors import RunFailed
from echelon.core.rulebook.module import BACKWARD_TWICE, FORWARD_THROUGH_MODULE
from echelon.layout.modules import ROOT
from echelon.parallel.module.gathering import (
    FirstStepTrace,
    ModuleParameterGathering,
    UnitEvent,
    agree_on_order,
    out_of_order,
)
from echelon.parallel.module.gradients import BackwardPasses, in_backward, when_backward_ends
from echelon.parallel.transport.collectives import Group


class _UnitEnds(torch.autograd.Function):
    """The inputs of a unit: its backward is over when theirs begins."""

    @staticmethod
    def forward(
        ctx: Any, hooks: ModuleHooks, unit: str, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the inputs; remember whose they are."""
        ctx.hooks, ctx.unit = hooks, unit
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Free the unit, and pass the gradients on."""
        ctx.hooks.backward_left(ctx.unit)
        return (None, None, *gradients)


class _GraphLifetime:
    """Live as long as the graph of one forward of the root."""

    __slots__ = ("__weakref__",)


class ModuleHooks:
    """Follow the passes of a module whose parameters rest as slices."""

    def __init__(self, gathering: ModuleParameterGathering, passes: BackwardPasses) -> None:
        self._gathering, self._passes = gathering, passes
        self._bucket_of = {
            id(slot.parameter): bucket for bucket in gathering.sliced for slot in bucket.slots
        }
        self.learning = bool(gathering.sliced)
        self._trace = FirstStepTrace()
        self._events: list[UnitEvent] = []
        self._events_back: list[UnitEvent] = []
        self._inside_back: set[str] = set()
        self._depth = self._rounds_left = self._num_forwards = self._num_backwards = 0
        self._running = False
        self._graphs: list[weakref.ref[_GraphLifetime]] = []

    def attach(self, model: nn.Module, units: Mapping[str, nn.Module]) -> None:
        """Watch a module and its units by hooks."""
        if not self._gathering.sliced:
            return
        self._passes.on_gradient = self._gradient_came
        self._gathering.on_passed = self._passes.complete
        model.register_forward_pre_hook(self._root_begins, prepend=True)
        model.register_forward_hook(self._root_ends, always_call=True)
        for unit, module in units.items():
            module.register_forward_pre_hook(
                partial(self._unit_begins, unit), with_kwargs=True, prepend=True
            )
            module.register_forward_hook(partial(self._unit_ends, unit))

    def end_step(self, world: Group) -> None:
        """Take part in what the others gather for passes of which this rank did none.

        After the first step the ranks tell one another in which order they used their units.
        """
        if self._num_forwards == 0:
            self._gathering.gather_kept()
            self._gathering.complete(self._gathering.forward)
        if self._num_backwards == 0:
            self._rounds_left = 1
            self._end_rounds()
        self._num_forwards = self._num_backwards = 0
        if self.learning:
            self.learning = False
            order = agree_on_order(world.gather_objects(self._trace))
            self._trace = FirstStepTrace()
            self._gathering.free_all()
            self._gathering.follow(order)
            trained = {bucket.name for bucket in self._passes.store.buckets}
            over = self._gathering.backward.ends() if self._gathering.frees else []
            self._passes.stream([name for name in over if name in trained])

    def free_all(self) -> None:
        """Free every unit, whatever may still want it."""
        self._graphs.clear()
        self._gathering.free_all()

    def backward_entered(self, unit: str, gradient: torch.Tensor) -> None:
        """Make a unit whole for its backward, and start on those that come after it there."""
        if torch.is_grad_enabled():
            raise RunFailed(
                BACKWARD_TWICE.problem(
                    f"a backward with create_graph=True came to {unit}, which is freed after it"
                )
            )
        self._begin_backward()
        if unit in self._inside_back:
            return
        gathering = self._gathering
        self._inside_back.add(unit)
        if self.learning:
            self._events_back.append(("enter", unit))
        elif gathering.frees and gathering.forward.follows(unit):
            sweep = gathering.backward
            if not sweep.follows(unit):
                raise out_of_order(unit, "in the first step no backward came to it")
            if sweep.passed(unit) and self._rounds_left > 1:
                # Two forwards have one backward, and that of the later one is over.
                gathering.complete(sweep)
                self._rounds_left -= 1
                self._inside_back = {unit}
            gathering.enter_unit(sweep, unit)

    def backward_left(self, unit: str) -> None:
        """Free what no later unit of this backward uses."""
        self._inside_back.discard(unit)
        gathering = self._gathering
        if self.learning:
            self._events_back.append(("leave", unit))
        elif gathering.frees and gathering.backward.follows(unit):
            gathering.leave_unit(gathering.backward, unit)

    # Forward.

    def _root_begins(self, module: nn.Module, args: Any) -> None:
        self._depth += 1
        if self._depth == 1 and not in_backward():
            self._events = []
            self._gathering.gather_kept()

    def _root_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._depth:
            return  # a hook before ours has refused the call
        self._depth -= 1
        if self._depth or in_backward():
            return
        self._gathering.complete(self._gathering.forward)
        self._num_forwards += 1
        if self.learning:
            self._trace.forwards.append(self._events)
        wanting = _with_gradient(output) if torch.is_grad_enabled() else []
        if wanting:
            graph = _GraphLifetime()
            for tensor in wanting:
                tensor.register_hook(partial(self._begin_backward, graph))
            self._graphs.append(weakref.ref(graph))
        elif not self._open_graphs():
            self._gathering.free_kept()

    def _unit_begins(self, unit: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if in_backward():
            self._entered_again(unit)
            return None
        if not self._depth:
            raise RunFailed(
                FORWARD_THROUGH_MODULE.problem(
                    f"{unit} was called by itself, and its parameters are away",
                    suggestions=("a call of the module that was given to parallelize",),
                )
            )
        if self.learning:
            self._events.append(("enter", unit))
        elif self._gathering.forward.follows(unit):
            self._gathering.enter_unit(self._gathering.forward, unit)
        if not torch.is_grad_enabled():
            return None
        leaves, spec = tree_flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if _needs_gradient(leaf)]
        if not places:
            return None
        ends = _UnitEnds.apply(self, unit, *(leaves[place] for place in places))
        for place, tensor in zip(places, ends, strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, spec)

    def _unit_ends(self, unit: str, module: nn.Module, args: Any, output: Any) -> None:
        if in_backward() or not self._depth:
            return
        if self.learning:
            self._events.append(("leave", unit))
        elif self._gathering.forward.follows(unit):
            self._gathering.leave_unit(self._gathering.forward, unit)
        for tensor in _with_gradient(output) if torch.is_grad_enabled() else ():
            tensor.register_hook(partial(self.backward_entered, unit))

    def _entered_again(self, unit: str) -> None:
        """Learn that backward computes the forward of a unit again (checkpointing)."""
        if self.learning:
            if unit not in self._inside_back:
                self._trace.irregular.add(unit)
            return
        for bucket in self._gathering.sliced:
            if unit in bucket.plan.units and not bucket.values_memory.present:
                raise out_of_order(unit, "backward computes its forward again before its turn")

    # Backward.

    def _begin_backward(self, *_: object) -> None:
        """Learn that a backward has come to an output; the hook that tells so holds its graph."""
        if self._running:
            return
        self._running = True
        self._events_back, self._inside_back = [], set()
        self._rounds_left = max(1, self._open_graphs())
        self._gathering.gather_kept()
        when_backward_ends(self._end_backward)

    @torch.no_grad()
    def _end_backward(self) -> None:
        self._running = False
        if self.learning:
            self._trace.backwards.append(self._events_back)
        self._end_rounds()
        self._graphs.clear()
        self._gathering.free_kept()

    def _end_rounds(self) -> None:
        """Go to the end of a backward: one round for each forward that it may have come from."""
        for _ in range(self._rounds_left if self._gathering.frees else 0):
            self._gathering.complete(self._gathering.backward)
        self._rounds_left = 0
        self._num_backwards += 1

    def _open_graphs(self) -> int:
        return sum(graph() is not None for graph in self._graphs)

    def _gradient_came(self, parameter: torch.Tensor) -> None:
        """Learn of a gradient: whoever uses its parameter must have been seen to do so."""
        bucket = self._bucket_of.get(id(parameter))
        if bucket is None:
            return
        if self.learning:
            users = set(bucket.plan.units)
            if not users & {*self._inside_back, ROOT}:
                self._trace.irregular |= users
        elif not bucket.values_memory.present:
            raise out_of_order(bucket.plan.units[0], "backward reads it outside of its turn")


def _with_gradient(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(output)[0] if _needs_gradient(leaf)]


def _needs_gradient(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad
