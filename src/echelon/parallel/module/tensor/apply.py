# SPDX-License-Identifier: Apache-2.0
"""How tensor ranks split a module, from what its user says: the rules, then the layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from echelon.core.errors import ConfigError
from echelon.core.plan import Plan
from echelon.core.rulebook.module import MODULE_TENSOR_GUESS
from echelon.layout.modules import UNSPLIT
from echelon.parallel.module.tensor.guess import guess_rules
from echelon.parallel.module.tensor.layers import TensorLink, cut_parameters, replace_layers
from echelon.parallel.module.tensor.ranks import watch_first_batch, watch_first_stream
from echelon.parallel.module.tensor.rules import (
    NamedTargets,
    RuleWord,
    find_targets,
    read_rules,
    rules_of,
)
from echelon.parallel.module.tensor.split import SplitPlan, plan_split
from echelon.parallel.transport.collectives import Group

AUTO, GUESS = "auto", "guess"

Rules = Mapping[str, RuleWord]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChoice:
    """Hold what a user says of tensor ranks: rules, or where they come from.

    `example` are the arguments of a forward that shows which layer feeds which.
    """

    rules: Rules | Literal["auto", "guess"] = AUTO
    example: Sequence[Any] = ()
    accepts_guess: bool = False


NO_RULES = TensorChoice()
"""What a class says of itself."""

_WHOLE = SplitPlan(
    split=UNSPLIT, layers=(), named=NamedTargets(targets=(), divisions=()), regions=frozenset()
)


def choose_split(
    plan: Plan, model: nn.Module, choice: TensorChoice, blocks: Sequence[str]
) -> SplitPlan:
    """Return how the tensor ranks of a plan split a module; ConfigError where they cannot."""
    degree, rules = plan.mesh.tp, choice.rules
    if isinstance(rules, str) and degree == 1:
        return _WHOLE
    if rules == GUESS:
        rules = guess_rules(model, choice.example)
        if not choice.accepts_guess:
            raise ConfigError(
                MODULE_TENSOR_GUESS.problem(
                    f"rules were guessed from one forward, and nobody has proven them: {rules}",
                    key="tensor",
                    suggestions=("echelon prove --module FILE:FACTORY", "guess='accept'"),
                )
            )
    elif isinstance(rules, str):
        rules = rules_of(model)
    named = find_targets(model, read_rules(rules))
    sequence = blocks if degree > 1 and plan.layout.sequence_parallel else None
    found = plan_split(model, named, degree=degree, blocks=sequence)
    return found if degree > 1 else _WHOLE


def apply_split(
    model: nn.Module, plan: SplitPlan, named: Mapping[str, nn.Parameter], group: Group
) -> TensorLink:
    """Cut the parameters of a module, and have its layers work on what is left.

    Return what moves values between tensor ranks.
    """
    if group.size == 1:
        return TensorLink(group)
    cut_parameters(plan, named, group)
    link = replace_layers(model, plan, group)
    watch_first_batch(model, group)
    for head in link.heads:
        watch_first_stream(head.module, link)
    return link
