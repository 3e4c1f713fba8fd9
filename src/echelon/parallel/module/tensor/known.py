# SPDX-License-Identifier: Apache-2.0
"""Rules that a model of transformers says of itself (`_tp_plan`), and those of two that say less.

GPT-2 says nothing; Phi-3 and its kin gather what a fused layer gives, as their code cuts it by the
sizes of the whole model. Here the parts of the fused layers are named, and the numbers are divided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from echelon.core.errors import ConfigError
from echelon.core.rulebook.module import MODULE_TENSOR_RULES
from echelon.layout.modules.tensor import Kind
from echelon.parallel.module.tensor.rules import RuleWord

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
