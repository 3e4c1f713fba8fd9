# SPDX-License-Identifier: Apache-2.0
"""The words of rules, and what of a module each of them names.

    {"layers.*.attn.qkv": ("column", 3)}         a linear layer of three parts, each of which is cut
    {"layers.*.attn.qkv": ("column", (64, 16, 16))}
    {"layers.*.attn.out": "row", "embedding": "vocabulary", "layers.*.attn.norm": "summed"}
    {"layers.*.attn.heads": "divide"}            a number that a module keeps of what it holds

`*` stands for one part of a name.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

from echelon.core.errors import ConfigError, Problem
from echelon.core.rulebook.module import MODULE_TENSOR_RULES
from echelon.core.rules import did_you_mean
from echelon.layout.modules.tensor import Kind

Parts = int | Sequence[int]
"""How many equal parts of a layer are cut one by one, or their sizes."""

RuleWord = str | tuple[str, Parts]
"""A kind, or "divide"; or a kind with the parts of a fused layer."""

KINDS: tuple[str, ...] = get_args(Kind)
DIVIDE = "divide"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedRule:
    """Hold a rule as it was given, in one form."""

    pattern: str
    kind: Kind | Literal["divide"]
    parts: Parts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Hold a module or a parameter that a rule names."""

    name: str
    rule: NamedRule
    module: nn.Module | None = None
    parameter: nn.Parameter | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Hold a whole number that a module, or a record that it keeps, has of what is cut."""

    name: str
    module: nn.Module
    path: tuple[str, ...]
    value: int

    def divide(self, degree: int) -> None:
        """Write what each rank has; records on the way become copies of this module's own."""
        owner: Any = self.module
        for part in self.path[:-1]:
            own = copy.copy(getattr(owner, part))
            setattr(owner, part, own)
            owner = own
        setattr(owner, self.path[-1], self.value // degree)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTargets:
    """Hold what rules name: layers and parameters, and numbers that are divided."""

    targets: tuple[Target, ...]
    divisions: tuple[Division, ...]


def read_rules(given: Mapping[str, RuleWord]) -> tuple[NamedRule, ...]:
    """Return rules in one form; ConfigError with every word that is none."""
    rules: list[NamedRule] = []
    problems: list[Problem] = []
    for pattern, said in given.items():
        word, parts = (said, None) if isinstance(said, str) else said
        if word in KINDS or word == DIVIDE:
            rules.append(NamedRule(pattern=pattern, kind=cast("Kind", word), parts=parts))
            continue
        problems.append(
            MODULE_TENSOR_RULES.problem(
                f"tensor[{pattern!r}] is {word!r}, which is no kind of split",
                key="tensor",
                suggestions=did_you_mean(word, [*KINDS, DIVIDE]) or KINDS,
            )
        )
    if problems:
        raise ConfigError(problems)
    return tuple(rules)


def find_targets(model: nn.Module, rules: Sequence[NamedRule]) -> NamedTargets:
    """Return what each rule names; ConfigError for one that names nothing, or what another does."""
    modules = {name: module for name, module in model.named_modules() if name}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    targets: dict[str, Target] = {}
    divisions: dict[str, Division] = {}
    problems: list[Problem] = []
    for rule in rules:
        if rule.kind == DIVIDE:
            found = list(_numbers(modules, rule.pattern))
            divisions |= {one.name: one for one in found}
            if not found:
                problems.append(_names_nothing(rule, [*modules]))
            continue
        wanted = _pattern(rule.pattern)
        names = [name for name in (*modules, *parameters) if wanted.fullmatch(name)]
        if not names:
            problems.append(_names_nothing(rule, [*modules, *parameters]))
        for name in names:
            if name in targets:
                other = targets[name].rule
                problems.append(
                    MODULE_TENSOR_RULES.problem(
                        f"{name} is named by {other.pattern!r} ({other.kind}) and by "
                        f"{rule.pattern!r} ({rule.kind})",
                        key="tensor",
                        suggestions=(f"one of them: {name!r}",),
                    )
                )
            targets[name] = Target(
                name=name,
                rule=rule,
                module=modules.get(name),
                parameter=parameters.get(name),
            )
    if problems:
        raise ConfigError(problems)
    return NamedTargets(targets=tuple(targets.values()), divisions=tuple(divisions.values()))


def _names_nothing(rule: NamedRule, known: Sequence[str]) -> Problem:
    numbered = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in known))
    what = "no number of a module" if rule.kind == DIVIDE else "no module and no parameter"
    return MODULE_TENSOR_RULES.problem(
        f"tensor[{rule.pattern!r}] names {what}",
        key="tensor",
        suggestions=did_you_mean(rule.pattern, numbered),
    )


def _pattern(pattern: str) -> re.Pattern[str]:
    parts = (r"[^.]+" if part == "*" else re.escape(part) for part in pattern.split("."))
    return re.compile(r"\.".join(parts))


def _numbers(modules: Mapping[str, nn.Module], pattern: str) -> Iterator[Division]:
    """Yield the whole numbers that a pattern names, in modules and in records that they keep."""
    parts = pattern.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        wanted, path = _pattern(".".join(parts[:cut])), tuple(parts[cut:])
        for name, module in modules.items():
            value = _value(module, path) if wanted.fullmatch(name) else None
            if isinstance(value, int) and not isinstance(value, bool):
                yield Division(
                    name=f"{name}.{'.'.join(path)}", module=module, path=path, value=value
                )


def _value(owner: Any, path: Sequence[str]) -> object:
    for part in path:
        if torch.is_tensor(owner) or not hasattr(owner, part):
            return None
        owner = getattr(owner, part)
        if isinstance(owner, nn.Module):
            return None  # that module has the number itself
    return owner
