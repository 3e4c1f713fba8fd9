# SPDX-License-Identifier: Apache-2.0
"""A rank's program with its wrappers taken off: modules, and parameters under plain names."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from echelon.core.errors import ConfigError
from echelon.core.rulebook.verify import VERIFY_RETURNED
from echelon.proof.verify.case import OnRank
from echelon.proof.verify.placement.located import LocatedTensor
from echelon.proof.verify.placement.names import NameTable

WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "DeepSpeedEngine": "module",
    "PipelineEngine": "module",
    "Float16Module": "module",
    "BFloat16Module": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "OptimizedModule": "_orig_mod",
}
"""Classes that wrap a module, and the attribute that holds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramParameter:
    """Hold one parameter of a program: its plain name, and that of the whole in its module."""

    name: str
    parameter: nn.Parameter
    model: nn.Module
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Hold the modules of a rank, its optimizers, its engine, and how names are found."""

    on_rank: OnRank
    modules: tuple[nn.Module, ...]
    optimizers: tuple[Any, ...]
    engine: Any
    table: NameTable

    def parameters(self) -> Iterator[ProgramParameter]:
        """Yield every parameter once, under its name without wrappers."""
        offsets = self.on_rank.layer_offsets or (0,) * len(self.modules)
        seen: set[int] = set()
        for module, offset in zip(self.modules, offsets, strict=True):
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield ProgramParameter(
                        name=plain_name(module, name),
                        parameter=parameter,
                        model=module,
                        offset=offset,
                    )

    def logical_modules(self, wanted: Collection[str]) -> list[tuple[str, nn.Module]]:
        """Return the modules that one device has too, under their names there; wrappers are not."""
        offsets = self.on_rank.layer_offsets or (0,) * len(self.modules)
        found: dict[str, nn.Module] = {}
        for model, offset in zip(self.modules, offsets, strict=True):
            for path, module in model.named_modules():
                name = self.table.logical_module(plain_name(model, path), module, offset)
                if name in wanted:
                    found.setdefault(name, module)
        return list(found.items())

    def locate(self, one: ProgramParameter, shape: Sequence[int]) -> LocatedTensor:
        """Return where a parameter lies, by the table or its name."""
        return self.table.locate(one.name, shape, one.offset)


def open_program(on_rank: OnRank, table: NameTable) -> Program:
    """Return the program of a rank; ConfigError where its models are no modules."""
    given = [*on_rank.models] or [on_rank.model if on_rank.model is not None else on_rank.engine]
    modules = tuple(_module(one) for one in given)
    engine = on_rank.engine
    if engine is None and hasattr(given[0], "module") and hasattr(given[0], "optimizer"):
        engine = given[0]
    optimizers = on_rank.optimizer
    if optimizers is None and engine is not None:
        optimizers = getattr(engine, "optimizer", None)
    if optimizers is None:
        optimizers = ()
    elif not isinstance(optimizers, (list, tuple)):
        optimizers = (optimizers,)
    if on_rank.layer_offsets and len(on_rank.layer_offsets) != len(modules):
        raise ConfigError(
            VERIFY_RETURNED.problem(
                f"OnRank has {len(modules)} models and {len(on_rank.layer_offsets)} layer_offsets"
            )
        )
    return Program(
        on_rank=on_rank,
        modules=modules,
        optimizers=tuple(optimizers),
        engine=engine,
        table=table,
    )


def _module(given: Any) -> nn.Module:
    """Return the module of a model, or of a stage of torch's pipelining."""
    if not isinstance(given, nn.Module):
        given = getattr(given, "submod", getattr(given, "module", given))
    if not isinstance(given, nn.Module):
        raise ConfigError(
            VERIFY_RETURNED.problem(
                f"OnRank: a model must be a module or a stage; it is {type(given).__name__}"
            )
        )
    return given


def plain_name(model: nn.Module, name: str) -> str:
    """Return the name of a parameter without the wrappers on its way."""
    module: Any = model
    parts: list[str] = []
    for part in name.split("."):
        if _inner(module) != part:
            parts.append(part)
        module = getattr(module, part, None)
    return ".".join(parts)


def _inner(module: Any) -> str | None:
    return next(
        (WRAPPERS[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in WRAPPERS), None
    )


def unwrapped(module: Any) -> Any:
    """Return the innermost module of wrappers around a whole model."""
    while (inner := _inner(module)) is not None:
        module = getattr(module, inner)
    return module


def torch_optimizer(optimizer: Any) -> torch.optim.Optimizer | None:
    """Return the optimizer of torch inside the wrappers of a framework; None without one."""
    seen: set[int] = set()
    found = None
    while optimizer is not None and id(optimizer) not in seen:
        seen.add(id(optimizer))
        if isinstance(optimizer, torch.optim.Optimizer):
            found = optimizer
        inner = getattr(optimizer, "optimizer", None)
        optimizer = inner if inner is not None else getattr(optimizer, "optim", None)
    return found
