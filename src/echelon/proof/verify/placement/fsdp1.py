# SPDX-License-Identifier: Apache-2.0
"""FSDP1 (`FullyShardedDataParallel`): slices of flat parameters, read from its handles.

A handle keeps the parameters of one wrapped module in one flat tensor, of which each rank holds an
equal slice; what of each parameter lies in it is written beside. With `use_orig_params` the
optimizer has the parts of the parameters themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from echelon.proof.verify.placement.program import Program, ProgramParameter, plain_name
from echelon.proof.verify.placement.torch_store import HeldParameter, TorchStore, place_of


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
