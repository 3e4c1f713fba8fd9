# SPDX-License-Identifier: Apache-2.0
"""What a user's file gives (`OneDevice`, `OnRank`) and what its functions are given (`VerifyCase`).

MESH = {"dp": 2, "tp": 2}            axes by name, outermost first
DTYPE = torch.float32                the run's own precision (default)
FLOAT64 = True                       False: the framework has no float64
NUM_STEPS, SEED = 3, 0

def one_device(case: ec.VerifyCase) -> ec.OneDevice: ...
def on_rank(case: ec.VerifyCase) -> ec.OnRank: ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyCase:
    """The case that a user's function builds: its rank, its precision.

    `mesh` holds the coordinate of this rank by axis (all 0 on one device), `degrees` the size of
    each axis.
    """

    rank: int
    world_size: int
    mesh: Mapping[str, int]
    degrees: Mapping[str, int]
    device: torch.device
    dtype: torch.dtype
    seed: int
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OneDevice:
    """Hold the training as it should be: plain code in one process, over the whole batch.

    `loss` returns the loss of a step, whose backward is what the ranks must have together.
    `clip_norm` clips the gradient by its global norm before the optimizer. `scheduler` is stepped
    after it. `parts`, if given, returns the sum of token losses and the number of tokens of each
    microbatch, so that a wrong weight of one of them (a mean of means) is named.
    """

    model: nn.Module
    loss: Callable[[int], torch.Tensor]
    optimizer: torch.optim.Optimizer
    clip_norm: float | None = None
    scheduler: Any = None
    parts: Callable[[int], Sequence[tuple[torch.Tensor, int]]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Logical:
    """Name the parameter of one device that a parameter of a rank is, or is a part of.

    `name` may contain `{layer}`. Ranks of `axis` (or of several axes, outermost first) hold equal
    slices along `dim`; without an axis every rank holds all of it. `part` is (start, end) along
    `dim` where one device has several of the program's parameters in one.
    """

    name: str
    dim: int = 0
    axis: str | tuple[str, ...] | None = None
    part: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """Name the parameters of one device that a rank holds in one tensor, such as q, k and v.

    Each rank holds its slice of each, one after the other along `dim`. `groups` is for those that
    interleave them, as many times in all: query groups of q, k, v for each key head.
    """

    parts: tuple[Logical, ...]
    dim: int = 0
    groups: int = 1


Names = Mapping[str, str | Logical | Fused]
"""Names of a program's parameters, with `{layer}` for a number, and what they are on one device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnRank:
    """Hold the program of one rank, in whatever framework; all is read from outside.

    A program has `step`, or `run` where its own loop takes all the steps.
    """

    model: Any = None
    """The model as the framework wraps it; a pipeline stage is one too."""
    optimizer: Any = None
    """The optimizer, or several; read from the engine where there is one."""
    step: Callable[[int], Any] | None = None
    """Runs one step: forward, backward, reduction, optimizer. Returns the loss (None where this
    rank has none), or a mapping with "loss" and, if known, "grad_norm" and "tokens" (those behind
    the loss of this rank)."""
    run: Callable[[], Any] | None = None
    """Runs all steps; returns nothing or what `step` would, in a list."""
    models: Sequence[Any] = ()
    """The stages of a rank that has several."""
    names: Names = field(default_factory=dict[str, "str | Logical | Fused"])
    """What the program's parameters are on one device, where names or shapes differ."""
    layer_offsets: Sequence[int] = ()
    """For each model, the layer of one device that its layer 0 is."""
    engine: Any = None
    """An engine such as DeepSpeed's, where the model is not the engine itself."""
    copy_initial: bool = False
    """Whether the first weights of one device are copied into the program's before it starts,
    where its framework draws other random numbers."""
    close: Callable[[], None] | None = None
    """Called when all steps are done."""
