# SPDX-License-Identifier: Apache-2.0
"""The words of rules, and what of a module each of them names.

    {"layers.*.attn.qkv": ("column", 3)}         a linear layer of three parts, each of which is cut
    {"layers.*.attn.qkv": ("column", (64, 16, 16))}
    {"layers.*.attn.out": "row", "embedding": "vocabulary", "layers.*.attn.norm": "summed"}
    {"layers.*.attn.heads": "divide"}            a number that a module keeps of what it holds

`*` stands for one part of a name.

GPT-2 says nothing; Phi-3 and its kin gather what a fused layer gives, as their code cuts it by the
sizes of the whole model. Here the parts of the fused layers are named, and the numbers are divided.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

from echelon.core.errors import ConfigError, Problem
from echelon.core.rulebook.module import MODULE_TENSOR_RULES
from echelon.core.rules import did_you_mean
from echelon.layout.modules import Kind

Parts = int | Sequence[int]
"""How many equal parts of a layer are cut one by one, or their sizes."""

RuleWord = str | tuple[str, Parts]
"""A kind, or "divide"; or a kind with the parts of a fused layer."""

KINDS: tuple[str, ...] = get_args(Kind)
DIVIDE = "divide"

WORDS: Mapping[str, Kind] = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "column-gathered",
    "colwise_rep": "column-gathered",
    "rowwise_split_input": "row-scattered",
    "embedding_rowwise": "vocabulary",
    "replicated_with_grad_allreduce": "summed",
    "sequence_parallel": "replicated",
}
"""What the words of transformers are here."""

_STACK = "moe_tp_experts"
"""Its word for a module with stacks of experts; it would cut each of them, here they stay whole."""


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


def rules_of(model: nn.Module) -> dict[str, RuleWord]:
    """Return the rules that the class of a model has; ConfigError where there are none."""
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", "")
    prefix = _prefix(model)
    if kind in KNOWN:
        return {f"{prefix}{name}": word for name, word in KNOWN[kind](config).items()} | _ends(
            model
        )
    said: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
    if not said:
        raise ConfigError(
            MODULE_TENSOR_RULES.problem(
                f"{type(model).__name__} does not say how tensor ranks split it",
                key="tensor",
                suggestions=("tensor={'NAME': 'column', ...}", "tensor='guess', example=(batch,)"),
            )
        )
    stacks = [name for name, word in said.items() if word == _STACK]
    inside = tuple(f"{name}." for name in stacks)
    problems = [
        MODULE_TENSOR_RULES.problem(
            f"{type(model).__name__} says {word!r} of {name}, which is not known here",
            key="tensor",
            suggestions=("tensor={'NAME': 'column', ...}", "mesh.tp = 1"),
        )
        for name, word in said.items()
        if word not in WORDS and word != _STACK and not name.startswith(inside)
    ]
    if problems:
        raise ConfigError(problems)
    present = {name: word for name, word in said.items() if _is_there(model, name)}
    layers = {
        n: WORDS[w] for n, w in present.items() if n not in stacks if not n.startswith(inside)
    }
    found = [name for name in stacks if name in present]
    return layers | _experts(model, found) | _ends(model)


def _experts(model: nn.Module, patterns: Sequence[str]) -> dict[str, RuleWord]:
    """Return the rules of stacks of experts, whole ones on each rank, and of their number."""
    found: dict[str, RuleWord] = {}
    for pattern in patterns:
        found[pattern] = "expert"
        named = [one for name, one in model.named_modules() if _fits(name, pattern)]
        if all(isinstance(getattr(one, "num_experts", None), int) for one in named):
            found[f"{pattern}.num_experts"] = "divide"
    return found


def _ends(model: nn.Module) -> dict[str, RuleWord]:
    """Return the rules of the embedding and of the head, which share a parameter where tied."""
    found: dict[str, RuleWord] = {}
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        layer = getattr(model, getter, lambda: None)()
        name = next((name for name, module in model.named_modules() if module is layer), "")
        if isinstance(layer, nn.Embedding | nn.Linear) and name:
            found[name] = "vocabulary"
    return found


def _is_there(model: nn.Module, pattern: str) -> bool:
    """Return whether a name of a plan is one of this model: plans name what a few models lack."""
    everything = [*model.named_modules(), *model.named_parameters()]
    return any(_fits(name, pattern) for name, _ in everything)


def _fits(name: str, pattern: str) -> bool:
    given, parts = name.split("."), pattern.split(".")
    same = len(given) == len(parts)
    return same and all(b in ("*", a) for a, b in zip(given, parts, strict=True))


def _prefix(model: nn.Module) -> str:
    name = getattr(model, "base_model_prefix", "")
    return f"{name}." if name and hasattr(model, name) else ""


def _gpt2(config: Any) -> dict[str, RuleWord]:
    return {
        "h.*.attn.c_attn": ("column", 3),
        "h.*.attn.c_proj": "row",
        "h.*.attn.split_size": "divide",
        "h.*.attn.num_heads": "divide",
        "h.*.mlp.c_fc": "column",
        "h.*.mlp.c_proj": "row",
    }


def _phi3(config: Any) -> dict[str, RuleWord]:
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return {
        "layers.*.self_attn.qkv_proj": (
            "column",
            (heads * width, groups * width, groups * width),
        ),
        "layers.*.self_attn.o_proj": "row",
        "layers.*.self_attn.config.num_attention_heads": "divide",
        "layers.*.self_attn.num_key_value_heads": "divide",
        "layers.*.mlp.gate_up_proj": ("column", 2),
        "layers.*.mlp.down_proj": "row",
    }


KNOWN: Mapping[str, Callable[[Any], dict[str, RuleWord]]] = {"gpt2": _gpt2, "phi3": _phi3}
"""Rules of models whose class says none, or less than there is, by the type of their
configuration."""
