# SPDX-License-Identifier: Apache-2.0
"""The optimizers, each as one record: what it keeps and reads, and where its update stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from echelon.core.choices.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRecord:
    """State the facts of one optimizer, and name its update and the oracle's formula of it."""

    name: str
    """What `optimizer.kind` takes."""
    title: str
    """What its authors call it."""
    paper: str
    """Where it comes from."""
    state: tuple[str, ...]
    """The tensors, each as large as the parameter, that it keeps from step to step."""
    settings: tuple[str, ...]
    """The fields of `Optimizer` that it reads, beside learning rate, decay and clipping."""
    runner: str
    """"module:class" of its fused update: an `ElementRule`, or where it needs whole matrices a
    class as `training.optimizer.muon.Muon`."""
    oracle: str
    """"module:function" of the formula on a whole tensor that a proof compares with."""
    others: str | None = None
    """The optimizer of all that is no matrix of a block; None where it takes every parameter."""
    needs_whole_matrices: bool = False
    """Whether an update takes the whole gradient of a matrix, not each element for itself."""
    one_pass: bool = False
    """Whether its fused update has a kernel that casts too: a `OnePassRule`."""
    is_scale_free: bool = True
    """Whether the size of an update does not follow that of the gradients."""
    gradient_behind: str = ""
    """"module:function" that inverts its first update to the gradient, where that can be done."""
    tool_names: Mapping[str, str] = field(default_factory=dict[str, str])
    """Its names in other tools, by the names of the tools."""


PLAIN_OPTIMIZER = "adamw"
"""What stands where none is named."""

_ADAM_SETTINGS = ("beta1", "beta2", "eps")

OPTIMIZERS = Registry(
    "optimizer",
    (
        OptimizerRecord(
            name="adamw",
            title="AdamW",
            paper="Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019",
            state=("exp_avg", "exp_avg_sq"),
            settings=_ADAM_SETTINGS,
            runner="echelon.training.optimizer.elementwise:AdamW",
            oracle="echelon.proof.oracle.optimizers:adamw",
            one_pass=True,
            gradient_behind="echelon.proof.causes.updates.updates:gradient_behind_adamw",
            tool_names={"megatron": "adam", "deepspeed": "AdamW", "torchtitan": "AdamW"},
        ),
        OptimizerRecord(
            name="sgd",
            title="SGD",
            paper="Sutskever et al., On the importance of initialization and momentum, 2013",
            state=("momentum",),
            settings=("momentum",),
            runner="echelon.training.optimizer.elementwise:MomentumSgd",
            oracle="echelon.proof.oracle.optimizers:sgd",
            one_pass=True,
            is_scale_free=False,
            tool_names={"megatron": "sgd", "deepspeed": "SGD"},
        ),
        OptimizerRecord(
            name="muon",
            title="Muon",
            paper="Jordan et al., Muon, 2024",
            state=("momentum",),
            settings=(*_ADAM_SETTINGS, "momentum", "newton_schulz_steps"),
            runner="echelon.training.optimizer.muon:Muon",
            oracle="echelon.proof.oracle.optimizers:muon",
            others="adamw",
            needs_whole_matrices=True,
            tool_names={"megatron": "muon", "deepspeed": "Muon"},
        ),
    ),
)
"""The record of each optimizer, by the name that `optimizer.kind` takes."""
