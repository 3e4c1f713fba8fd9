# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed, ZeRO 0 to 3 and its pipeline engine: values by its own safe-get functions.

These gather what ranks have shared out, so every rank is seen with whole tensors; a slice that is
updated wrongly shows in them. Gradients are read when the engine is about to update, before it
clips.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from echelon.core.errors import ConfigError
from echelon.core.rulebook.verify import VERIFY_OPTIMIZER
from echelon.proof.evidence.captured import SHARDS_PARAMETERS
from echelon.proof.verify.placement.located import Interposed, LocatedTensor
from echelon.proof.verify.placement.program import Program, torch_optimizer
from echelon.proof.verify.placement.torch_store import Fragment, HeldParameter, TorchStore

_STATE = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def is_deepspeed(program: Program) -> bool:
    """Return whether a program has an engine of DeepSpeed."""
    names = {cls.__name__ for cls in type(program.engine).__mro__}
    return "DeepSpeedEngine" in names


class DeepSpeedStore(TorchStore):
    """Read what an engine of DeepSpeed holds."""

    reads_clipped = False

    def __init__(self, program: Program) -> None:
        """Find the place of every parameter."""
        self.program = program
        self.engine = program.engine
        self.stage = int(self.engine.zero_optimization_stage())
        self.held = list(self.find(program))
        base = torch_optimizer(self.engine.optimizer)
        if base is None:
            text = "the engine of DeepSpeed has no optimizer of torch inside"
            raise ConfigError(VERIFY_OPTIMIZER.problem(text))
        self.base = base

    def find(self, program: Program) -> Iterator[HeldParameter]:
        """Yield every parameter with its place; at stage 3 its shape is that before sharding."""
        for one in program.parameters():
            shape = getattr(one.parameter, "ds_shape", one.parameter.shape)
            place = program.locate(one, shape)
            yield HeldParameter(name=one.name, parameter=one.parameter, place=place)

    def on_update(self, before: Callable[[Any], None]) -> list[Any]:
        """Have `before` called when the engine is about to update."""
        return [Interposed(self.engine, "_take_model_step", lambda: before(self.engine))]

    def parameters(self) -> Iterator[Fragment]:
        """Yield the values of all parameters, gathered where they are shared out."""
        from deepspeed.utils import safe_get_full_fp32_param

        for held in self.held:
            shared = self.stage >= SHARDS_PARAMETERS
            value = safe_get_full_fp32_param(held.parameter) if shared else held.parameter
            yield from _whole(held, value)

    def gradients(self, optimizer: Any) -> Iterator[Fragment]:
        """Yield the gradients that the engine has reduced."""
        from deepspeed.utils import safe_get_full_grad

        for held in self.held:
            if held.parameter.requires_grad:
                gradient = held.parameter.grad if self.stage == 0 else None
                if gradient is None:
                    gradient = safe_get_full_grad(held.parameter)
                yield from _whole(held, gradient)

    def state(self) -> Iterator[tuple[str, Fragment]]:
        """Yield moments, gathered where they are shared out."""
        from deepspeed.utils import safe_get_full_optimizer_state

        if self.stage == 0:
            self.optimizers = [self.base]
            yield from super().state()
            return
        keys = {key for state in self.base.state.values() for key in state}
        for key in (key for key in _STATE if key in keys):
            for held in self.held:
                if held.parameter.requires_grad:
                    value = safe_get_full_optimizer_state(held.parameter, key)
                    yield from ((key, one) for one in _whole(held, value))

    def leaves(self) -> Iterator[HeldParameter]:
        """Yield no parameter at stage 3: what backward makes there is cut at once."""
        if self.stage < SHARDS_PARAMETERS:
            yield from super().leaves()

    def write(self, values: Callable[[LocatedTensor], torch.Tensor]) -> None:
        """Write first values into parameters and their master copies."""
        from deepspeed.utils import safe_set_full_fp32_param

        with torch.no_grad():
            for held in self.held:
                shape = getattr(held.parameter, "ds_shape", held.parameter.shape)
                value = values(held.place).reshape(shape)
                if self.stage < SHARDS_PARAMETERS:
                    held.parameter.copy_(value)
                if self.stage:
                    safe_set_full_fp32_param(held.parameter, value.float())

    def grad_norm(self) -> float | None:
        """Return the norm that the engine keeps of the last step."""
        norm = self.engine.get_global_grad_norm()
        return None if norm is None else float(norm)


def _whole(held: HeldParameter, value: torch.Tensor | None) -> Iterator[Fragment]:
    if value is not None:
        values = value.detach().reshape(-1)
        yield Fragment(name=held.name, place=held.place, values=values)
