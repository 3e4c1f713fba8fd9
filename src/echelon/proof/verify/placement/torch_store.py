# SPDX-License-Identifier: Apache-2.0
"""Values of programs of torch: plain modules, DDP, DTensor, FSDP1.

What a DTensor holds (tensor-parallel plans, FSDP2, torchtitan) is read from its placements and
mesh; everything else is whole, or as the table of names says. Gradients are read when the optimizer
takes them: clipped, if the program clips.

A handle of FSDP1 (`FullyShardedDataParallel`) keeps the parameters of one wrapped module in one
flat tensor, of which each rank holds an equal slice; what of each parameter lies in it is written
beside. With `use_orig_params` the optimizer has the parts of the parameters themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Replicate

from echelon.core.errors import ConfigError
from echelon.core.rulebook.verify import VERIFY_NAMES, VERIFY_OPTIMIZER
from echelon.proof.verify.case import Fused
from echelon.proof.verify.placement.located import LocatedTensor, located
from echelon.proof.verify.placement.program import (
    Program,
    ProgramParameter,
    plain_name,
    torch_optimizer,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """Hold values of a tensor of this rank: flat, from `start` on in its own order."""

    name: str
    place: LocatedTensor
    values: torch.Tensor
    start: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldParameter:
    """Hold a parameter of this rank, as its optimizer knows it, and its place.

    Where frameworks keep flat slices of many, it is the part `cut` of a flat `parameter`, and that
    is the part from `start` on of the tensor that lies at `place`.
    """

    name: str
    parameter: nn.Parameter
    place: LocatedTensor
    cut: slice | None = None
    start: int = 0


class TorchStore:
    """Read what a program of torch holds."""

    reads_clipped = True
    """Whether gradients are read after the program has clipped them."""

    owners: Mapping[int, tuple[nn.Module, str]] = MappingProxyType({})
    """The module of each parameter, by its id, and its name there; engines replace some at will."""

    def __init__(self, program: Program) -> None:
        """Find the place of every parameter; ConfigError names one that has none."""
        self.program = program
        self.held = list(self.find(program))
        self.owners = {
            id(parameter): (module, attribute)
            for model in program.modules
            for module in model.modules()
            for attribute, parameter in module._parameters.items()
        }
        self.optimizers = [
            found for one in program.optimizers if (found := torch_optimizer(one)) is not None
        ]
        if not self.optimizers:
            raise ConfigError(
                VERIFY_OPTIMIZER.problem(
                    "OnRank.optimizer is none of torch and none of a known engine",
                    suggestions=("OnRank(optimizer=...)", "OnRank(engine=...)"),
                )
            )

    def find(self, program: Program) -> Iterator[HeldParameter]:
        """Yield every parameter with its place."""
        for one in program.parameters():
            place = place_of(program, one)
            yield HeldParameter(name=one.name, parameter=one.parameter, place=place)

    def on_update(self, before: Callable[[Any], None]) -> list[Any]:
        """Have `before` called with each optimizer when it is about to update; return handles."""
        return [
            optimizer.register_step_pre_hook(lambda one, *_: before(one))
            for optimizer in self.optimizers
        ]

    def parameters(self) -> Iterator[Fragment]:
        """Yield the values of all parameters."""
        for held in self.held:
            yield _fragment(held, held.parameter)

    def gradients(self, optimizer: Any) -> Iterator[Fragment]:
        """Yield the gradients that an optimizer is about to take; one that is not there is zero."""
        taken = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for held in self.held:
            if id(held.parameter) in taken:
                gradient = held.parameter.grad
                if gradient is None:
                    gradient = torch.zeros_like(held.parameter)
                yield _fragment(held, gradient)

    def stand_ins(self) -> Iterator[Fragment]:
        """Yield the gradients of tensors that modules have in the place of their parameters."""
        for held in self.held:
            module, attribute = self.owners.get(id(held.parameter), (None, ""))
            now: Any = getattr(module, attribute, None)
            leaf = _leaf_of(now) if torch.is_tensor(now) and now is not held.parameter else None
            if leaf is None or leaf is held.parameter or leaf.grad is None:
                continue
            values = local_of(leaf.grad).reshape(-1)
            if values.numel() == held.place.numel:
                yield Fragment(name=held.name, place=held.place, values=values)

    def state(self) -> Iterator[tuple[str, Fragment]]:
        """Yield what the optimizers keep of each parameter, by its key."""
        for held in self.held:
            for optimizer in self.optimizers:
                state = optimizer.state.get(held.parameter, {})
                for key, value in state.items():
                    if torch.is_tensor(value) and value.shape == held.parameter.shape:
                        yield key, _fragment(held, value)

    def leaves(self) -> Iterator[HeldParameter]:
        """Yield the parameters on which a hook sees what backward makes on this rank."""
        for held in self.held:
            parameter = held.parameter
            whole = held.cut is None and not isinstance(parameter, DTensor)
            if parameter.requires_grad and parameter.numel() == held.place.numel and whole:
                yield held

    def write(self, values: Callable[[LocatedTensor], torch.Tensor]) -> None:
        """Write first values over those that the program has drawn."""
        with torch.no_grad():
            for held in self.held:
                local = local_of(held.parameter)
                flat = local.view(-1)[held.cut or slice(None)]
                flat.copy_(values(held.place)[held.start : held.start + flat.numel()])

    def grad_norm(self) -> float | None:
        """Return the norm that the framework has computed, where it keeps it."""
        return None


def place_of(program: Program, one: ProgramParameter) -> LocatedTensor:
    """Return where a parameter lies: by its placements, or by the table of names."""
    parameter = one.parameter
    if not isinstance(parameter, DTensor):
        return program.locate(one, parameter.shape)
    target = program.table.logical_name(one.name, one.offset)
    if isinstance(target, Fused):
        problem = f"{one.name} is a DTensor: its placement is read, names can only rename it"
        raise ConfigError(VERIFY_NAMES.problem(problem))
    name = target if isinstance(target, str) else target.name
    canonical = program.table.resolve(name, one.name)
    elements = program.table.logical.elements(canonical)
    if tuple(elements.shape) != tuple(parameter.shape):
        raise ConfigError(
            VERIFY_NAMES.problem(
                f"{one.name} has global shape {list(parameter.shape)}, and {canonical} has "
                f"{list(elements.shape)} on one device"
            )
        )
    return located(canonical, placed_elements(elements, parameter))


def placed_elements(elements: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds of a DTensor.

    What FSDP2 shards over a dim that a tensor-parallel plan has split before (a strided shard) is a
    slice of that rank's part, so the others come first.
    """
    here = parameter.device_mesh.get_coordinate()
    if here is None:
        return elements.reshape(-1)[:0]
    cuts: list[tuple[int, int, bool]] = []
    placements: list[Any] = list(parameter.placements)
    for mesh_dim, placement in enumerate(placements):
        if not isinstance(placement, (Replicate, Partial)):
            cuts.append((mesh_dim, placement.dim, type(placement).__name__ == "_StridedShard"))
    plain = [cut for cut in cuts if not cut[2]]
    strided = [cut for cut in reversed(cuts) if cut[2]]
    for mesh_dim, dim, _ in (*plain, *strided):
        chunks = elements.chunk(parameter.device_mesh.size(mesh_dim), dim)
        place = here[mesh_dim]
        elements = chunks[place] if place < len(chunks) else elements.narrow(dim, 0, 0)
    return elements


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds; sums that are still due are made."""
    found: Any = tensor.detach()
    if not isinstance(found, DTensor):
        return found
    if any(isinstance(placement, Partial) for placement in found.placements):
        whole = [Replicate() if isinstance(p, Partial) else p for p in found.placements]
        found = found.redistribute(placements=whole)
    local: Any = found
    return local.to_local()


def _leaf_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that gets the gradient of another which is nothing but a form of it."""
    if tensor.is_leaf:
        return tensor
    node: Any = tensor.grad_fn
    while node is not None and not hasattr(node, "variable"):
        behind = [other for other, _ in node.next_functions if other is not None]
        node = behind[0] if len(behind) == 1 else None
    return None if node is None else node.variable


def _fragment(held: HeldParameter, tensor: torch.Tensor) -> Fragment:
    """Return the values of a tensor that lies as a parameter does."""
    parameter: Any = held.parameter
    value: Any = tensor
    both = isinstance(value, DTensor) and isinstance(parameter, DTensor)
    if both and value.placements != parameter.placements:
        value = value.redistribute(placements=parameter.placements)
    values = local_of(value).reshape(-1)[held.cut or slice(None)]
    return Fragment(name=held.name, place=held.place, values=values, start=held.start)


def is_fsdp1(program: Program) -> bool:
    """Return whether any module of a program is wrapped by FSDP1."""
    return any(
        isinstance(inner, FullyShardedDataParallel)
        for module in program.modules
        for inner in module.modules()
    )


class Fsdp1Store(TorchStore):
    """Read the slices of flat parameters that a rank holds."""

    def find(self, program: Program) -> Iterator[HeldParameter]:
        """Yield the part of each parameter in the slices of this rank."""
        flat: set[int] = set()
        offsets = program.on_rank.layer_offsets or (0,) * len(program.modules)
        for module, offset in zip(program.modules, offsets, strict=True):
            for name, inner in module.named_modules():
                handle = getattr(inner, "_handle", None)
                if isinstance(inner, FullyShardedDataParallel) and handle is not None:
                    flat |= {id(handle.flat_param), *map(id, handle.flat_param._params or ())}
                    yield from _held(program, module, (name, offset), handle)
        for one in program.parameters():
            if id(one.parameter) not in flat:
                place = place_of(program, one)
                yield HeldParameter(name=one.name, parameter=one.parameter, place=place)


def _held(
    program: Program, module: nn.Module, at: tuple[str, int], handle: Any
) -> Iterator[HeldParameter]:
    prefix, offset = at
    flat: Any = handle.flat_param
    start = 0
    for number, (fqn, shape) in enumerate(zip(flat._fqns, flat._shapes, strict=True)):
        path = f"{prefix}._fsdp_wrapped_module.{fqn}".removeprefix(".")
        name = plain_name(module, path)
        one = ProgramParameter(name=name, parameter=flat, model=module, offset=offset)
        place = program.locate(one, shape)
        if handle.uses_sharded_strategy:
            info = flat._shard_param_infos[number]
            if not info.in_shard:
                continue
            cut = slice(info.offset_in_shard, info.offset_in_shard + info.numel_in_shard)
            begin = info.intra_param_start_idx
        else:
            cut, begin = slice(start, start + shape.numel()), 0
            start += shape.numel()
        parameter = flat
        if handle._use_orig_params:
            parameter, cut = flat._params[number], None
        yield HeldParameter(name=name, parameter=parameter, place=place, cut=cut, start=begin)
