# SPDX-License-Identifier: Apache-2.0
"""The modes that join the steps of a run, each as one record: who builds it, and its reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from echelon.core.choices.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPartRecord:
    """Name what a mode brings: a part of each step, another engine, or both."""

    name: str
    """Its name."""
    part: str = ""
    """"module:function" that takes a `StepPlace` of `training/steps/part.py` and returns the part
    of a rank; None under a plan without the mode. Empty where each step is as without it."""
    engine: str = ""
    """"module:function" that takes a plan and a rank, and returns the class of the engine of that
    rank; None under a plan without the mode. Empty where any engine will do."""
    oracle: str = ""
    """"module:function" for a proof: takes a plan, and the values of all parameters by name before
    the first step and after each; returns the values that the part keeps after the last one, by
    kind and name (`StepPart.proven`). Empty where it keeps none, or has claims of its own."""
    tool_names: Mapping[str, str] = field(default_factory=dict[str, str])
    """Its names in other tools, by the names of the tools."""


STEP_PARTS = Registry(
    "step part",
    (
        StepPartRecord(
            name="expert-balance", part="echelon.training.steps.expert_balance:expert_balance"
        ),
        StepPartRecord(name="fp8-scales", part="echelon.training.steps.fp8_scales:fp8_scales"),
        StepPartRecord(
            name="local-sgd", part="echelon.training.local_sgd.elastic_steps:outer_steps"
        ),
        StepPartRecord(
            name="parameter-servers", engine="echelon.training.servers.asynchronous:engine_of"
        ),
    ),
)
"""All of them, in the order in which a step comes to them."""
