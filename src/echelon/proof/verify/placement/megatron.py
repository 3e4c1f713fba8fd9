# SPDX-License-Identifier: Apache-2.0
"""Megatron-core: tensor-parallel attributes, main gradients, shards of its distributed optimizer.

A parameter says itself over which dim its ranks split it (`tensor_model_parallel`, `partition_dim`,
`partition_stride`); gated layers hold gate and up one after the other. One device is best the same
model with degrees of 1: names are then the same. The axes of MESH are called tp, pp, ep.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from echelon.core.errors import ConfigError
from echelon.core.rulebook.verify import VERIFY_NAMES
from echelon.proof.verify.placement.located import (
    Interposed,
    LocatedTensor,
    located,
    padded,
)
from echelon.proof.verify.placement.program import Program, ProgramParameter
from echelon.proof.verify.placement.torch_store import Fragment, HeldParameter, TorchStore

_TENSOR = "tp"
_EXPERT = "ep"
_LOCAL_EXPERT = re.compile(r"(?<=local_experts\.)\d+")


def is_megatron(program: Program) -> bool:
    """Return whether parameters of a program are Megatron's."""
    return any(
        hasattr(parameter, "main_grad") or hasattr(parameter, "tensor_model_parallel")
        for module in program.modules
        for parameter in module.parameters()
    )


class MegatronStore(TorchStore):
    """Read what a program of Megatron-core holds."""

    reads_clipped = False

    def __init__(self, program: Program) -> None:
        """Find the place of every parameter, and the optimizers in the chain."""
        self.program = program
        self.held = list(self.find(program))
        self.chains = program.optimizers
        self.parts = [
            part for one in self.chains for part in getattr(one, "chained_optimizers", (one,))
        ]
        self._norm: float | None = None

    def find(self, program: Program) -> Iterator[HeldParameter]:
        """Yield every parameter with its place, by its attributes."""
        for one in program.parameters():
            place = _place(program, one)
            yield HeldParameter(name=one.name, parameter=one.parameter, place=place)

    def on_update(self, before: Callable[[Any], None]) -> list[Any]:
        """Have `before` called when an optimizer is about to step; its norm is kept."""
        return [
            Interposed(one, "step", lambda one=one: before(one), self._keep_norm)
            for one in self.chains
        ]

    def gradients(self, optimizer: Any) -> Iterator[Fragment]:
        """Yield what lies in the gradient buffers: all, or the shard that this rank reduces."""
        for held in self.held:
            gradient = getattr(held.parameter, "main_grad", None)
            gradient = held.parameter.grad if gradient is None else gradient
            if gradient is None:
                gradient = torch.zeros_like(held.parameter)
            for start, end, _ in self._shards(held.parameter):
                values = gradient.reshape(-1)[start:end]
                yield Fragment(name=held.name, place=held.place, values=values, start=start)

    def state(self) -> Iterator[tuple[str, Fragment]]:
        """Yield the moments, which lie as the shards of the optimizer."""
        for held in self.held:
            for start, end, main in self._shards(held.parameter):
                for part in self.parts:
                    state = part.optimizer.state.get(main, {})
                    for key, value in state.items():
                        if torch.is_tensor(value) and value.numel() == end - start and value.dim():
                            values = value.detach().reshape(-1)
                            yield (
                                key,
                                Fragment(
                                    name=held.name, place=held.place, values=values, start=start
                                ),
                            )

    def leaves(self) -> Iterator[HeldParameter]:
        """Yield every parameter: what backward makes goes into its buffer."""
        yield from (held for held in self.held if held.parameter.requires_grad)

    def write(self, values: Callable[[LocatedTensor], torch.Tensor]) -> None:
        """Write first values, and have the optimizers take their master copies from them."""
        super().write(values)
        for part in self.parts:
            part.reload_model_params()

    def grad_norm(self) -> float | None:
        """Return the norm that the last step told."""
        return self._norm

    def _keep_norm(self, result: Any) -> None:
        told = result[1] if isinstance(result, tuple) and len(result) > 1 else None
        self._norm = None if told is None else float(told)

    def _shards(self, parameter: Any) -> Iterator[tuple[int, int, Any]]:
        """Yield which elements of a parameter this rank updates, and the optimizer's tensor."""
        for part in self.parts:
            ranges = getattr(part, "model_param_gbuf_map", None)
            if ranges is None:
                main = getattr(parameter, "main_param", None)
                main = parameter if main is None else main
                if any(
                    one is main for group in part.optimizer.param_groups for one in group["params"]
                ):
                    yield 0, parameter.numel(), main
            elif parameter in ranges:
                index, dtype, bucket = ranges[parameter]
                held = part.gbuf_ranges[index][dtype][bucket]["param_map"].get(parameter)
                if held is not None:
                    shard = held["param"]
                    yield shard.start, shard.end, _main(part, parameter)


def _main(part: Any, parameter: Any) -> Any:
    """Return the tensor of a distributed optimizer that updates a parameter."""
    for groups, shards in (
        (part.model_float16_groups, part.shard_fp32_from_float16_groups),
        (part.model_fp32_groups, part.shard_fp32_groups),
    ):
        for models, mains in zip(groups, shards, strict=True):
            for model, main in zip(models, mains, strict=True):
                if model is parameter:
                    return main
    return parameter


def _place(program: Program, one: ProgramParameter) -> LocatedTensor:
    """Return where a parameter lies: by the table if it is there, else by Megatron's attributes."""
    table, parameter = program.table, one.parameter
    offset = one.offset or _layer_offset(one)
    target = table.logical_name(one.name, offset)
    if not isinstance(target, str):
        return table.locate(one.name, parameter.shape, offset)
    name = target
    expert = _LOCAL_EXPERT.search(name)
    if expert is not None and table.mesh.degrees.get(_EXPERT, 1) > 1:
        name = _LOCAL_EXPERT.sub(str(_expert_number(program, name, int(expert[0]))), name)
    canonical = table.resolve(name, one.name)
    elements = table.logical.elements(canonical)
    if getattr(parameter, "tensor_model_parallel", False) and _TENSOR in table.mesh.degrees:
        elements = _tensor_part(program, one, elements)
    if elements.numel() != parameter.numel():
        raise ConfigError(
            VERIFY_NAMES.problem(
                f"{one.name} has shape {list(parameter.shape)} on rank {table.rank}, but its part "
                f"of {canonical} {list(table.logical.shapes[canonical])} is {list(elements.shape)}",
                suggestions=("MESH with axes tp, pp, ep", "OnRank(names=...)"),
            )
        )
    return located(canonical, elements)


def _tensor_part(program: Program, one: ProgramParameter, elements: torch.Tensor) -> torch.Tensor:
    parameter: Any = one.parameter
    degree = program.table.mesh.degrees[_TENSOR]
    place = program.table.mesh.coordinates(program.table.rank)[_TENSOR]
    dim = int(parameter.partition_dim)
    pieces = int(getattr(parameter, "partition_stride", 1))
    if _is_gated(one):
        pieces = 2
    local = parameter.shape[dim]
    elements = padded(elements, dim, local * degree)
    chunks = elements.chunk(pieces * degree, dim)
    return torch.cat(chunks[place::degree], dim)


def _is_gated(one: ProgramParameter) -> bool:
    """Return whether a parameter holds a gate and an up projection, one after the other."""
    path, _, _ = one.name.rpartition(".")
    owner: Any = one.model
    while hasattr(owner, "module"):
        owner = owner.module
    for part in path.split(".")[:-1]:
        owner = getattr(owner, part, None)
    config = getattr(owner, "config", None)
    return path.endswith("linear_fc1") and bool(getattr(config, "gated_linear_unit", False))


def _layer_offset(one: ProgramParameter) -> int:
    """Return by how much the number of a layer in the whole model, which it knows, is larger."""
    owner: Any = one.model
    while hasattr(owner, "module"):
        owner = owner.module
    match = re.search(r"(?<=layers\.)\d+", one.name)
    if match is None:
        return 0
    for part in one.name[: match.end()].split("."):
        owner = getattr(owner, part, None)
    number = getattr(owner, "layer_number", None)
    return 0 if number is None else int(number) - 1 - int(match[0])


def _expert_number(program: Program, name: str, local: int) -> int:
    """Return the number of an expert of this rank among all."""
    table = program.table
    pattern = re.compile(re.escape(name).replace(f"local_experts\\.{local}", r"local_experts\.\d+"))
    every = sum(1 for other in table.logical.shapes if pattern.fullmatch(other))
    degree = table.mesh.degrees[_EXPERT]
    return table.mesh.coordinates(table.rank)[_EXPERT] * (every // degree) + local
