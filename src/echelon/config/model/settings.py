# SPDX-License-Identifier: Apache-2.0
"""Settings of the model -> ModelShape: presets and config.json expanded, the rest derived."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, cast

from echelon.config.derived.experts import BALANCE_KEY, BIAS_KEY, HAS_BIAS
from echelon.config.entries import Entry
from echelon.config.presets import read_preset
from echelon.config.schema import MODEL_SOURCES
from echelon.config.setting_layers import model_preset_problem, preset_entries
from echelon.config.view import Unavailable, View, record
from echelon.core.choices.lora import (
    ALL_LINEAR,
    ATTENTION_LINEARS,
    LATENT_LINEARS,
    LORA_LINEARS,
    MLP_LINEARS,
    Lora,
)
from echelon.core.errors import Problem
from echelon.core.model_shape import (
    NEEDED_BY_KIND,
    Experts,
    LatentAttention,
    ModelShape,
    Multipliers,
    RopeKind,
    RopeScaling,
    Rotary,
)
from echelon.core.rulebook.config import MISSING_SETTING

REQUIRED = ("layers", "hidden", "heads", "ffn", "vocab", "max_positions")
LATENT_PARTS = ("model.latent.nope_dim", "model.latent.rope_dim")
NAMED_EXPERTS = ("model.experts.num_experts", "model.experts.top_k", "model.experts.ffn")
NAMED_KINDS = "model.rope_scaling.kind"
PARTS = {"rope_scaling": RopeScaling, "latent": LatentAttention, "experts": Experts}


def expand_model(entries: Mapping[str, Entry]) -> tuple[dict[str, Entry], list[Problem]]:
    """Return the entries with those of `model.preset` or `model.hf_config` under them.

    A model whose named source is changed by other settings is called so.
    """
    named = next((entries[key] for key in MODEL_SOURCES if key in entries), None)
    if named is None:
        return dict(entries), []
    if "model.preset" in entries:
        if problem := model_preset_problem(named):
            return dict(entries), [problem]
        preset = read_preset("models", str(named.value))
        assert preset is not None
        name = preset.name
        below = {k: e for k, e in preset_entries(preset).items() if k.startswith("model.")}
    else:
        from echelon.config.model.hugging_face import ASSUMED_KEY, read_hf_config, still_assumed

        path = View(entries=entries).path("model.hf_config")
        below, problems = read_hf_config(path, named.source)
        if problems:
            return dict(entries), problems
        if ASSUMED_KEY in below:
            below[ASSUMED_KEY] = still_assumed(below[ASSUMED_KEY], frozenset(entries))
        folder = path if path.is_dir() else path.parent
        name = folder.resolve().name or "hf-config"
    changed = any(
        key in below and entry.value != below[key].value
        for key, entry in entries.items()
        if key.startswith("model.") and key not in MODEL_SOURCES and key != "model.name"
    )
    label = Entry(value=f"{name}-changed" if changed else name, source=named.source)
    return {"model.name": label, **below, **entries}, []


def derive_model(view: View, run_name: str) -> Iterator[tuple[str, Entry]]:
    """Yield the settings of the model that follow from others."""
    if not view.has("model.name"):
        yield "model.name", Entry(value=run_name, source="derived: the run's name")
    yield from _derived_bias(view)
    try:
        heads = view.integer("model.heads")
        if not view.has("model.kv_heads"):
            yield "model.kv_heads", Entry(value=heads, source="derived: heads")
        parts = [view.integer(key) for key in LATENT_PARTS if view.has(key)]
        if not view.has("model.head_dim") and len(parts) == len(LATENT_PARTS):
            source = "derived: latent.nope_dim + rope_dim"
            yield "model.head_dim", Entry(value=sum(parts), source=source)
            return
        hidden = view.integer("model.hidden")
        if not view.has("model.head_dim") and hidden % heads == 0:
            yield "model.head_dim", Entry(value=hidden // heads, source="derived: hidden / heads")
    except Unavailable:
        return


def _derived_bias(view: View) -> Iterator[tuple[str, Entry]]:
    """Yield the bias of a router that balances by it, where nobody says whether there is one."""
    if BIAS_KEY in view.entries or BALANCE_KEY in view.wrong:
        return
    if view.word(BALANCE_KEY) in HAS_BIAS and any(map(view.has, NAMED_EXPERTS)):
        yield BIAS_KEY, Entry(value=True, source=f"derived: {BALANCE_KEY}")


def model_problems(view: View) -> Iterator[Problem]:
    """Yield everything that is missing from the model, key by key."""
    named = (key for key in (*view.entries, *view.wrong) if key.startswith("model."))
    if not any(key != "model.name" for key in named):
        yield MISSING_SETTING.problem(
            "there is no model: name a preset, a config.json, or its layers, hidden, heads, "
            "ffn, vocab and max_positions",
            key="model",
            suggestions=('model.preset = "gpt2"', 'model.hf_config = "PATH/config.json"'),
        )
        return
    for name in REQUIRED:
        key = f"model.{name}"
        if not view.has(key) and key not in view.wrong:
            yield MISSING_SETTING.problem(
                f"{key} is not set and has no default", key=key, suggestions=_ways(view, key)
            )
    for part, kind in PARTS.items():
        keys = {f"model.{part}.{field.name}" for field in fields(kind)}
        if any(key in view.entries for key in keys):
            for key in sorted(keys - view.wrong):
                if not view.has(key):
                    yield MISSING_SETTING.problem(
                        f"{key} is not set and has no default",
                        key=key,
                        suggestions=_ways(view, key),
                    )
    yield from _missing_of_stretch(view)


def _ways(view: View, key: str) -> tuple[str, ...]:
    """Return a value for a missing setting of a model, by what the model has."""
    like = {"model.experts.ffn": "model.ffn", "model.kv_heads": "model.heads"}.get(key, "")
    return (f"{key} = {view.value(like)}",) if like and view.has(like) else (f"{key} = N",)


def _missing_of_stretch(view: View) -> Iterator[Problem]:
    """Yield what the formula of a stretch of rotary frequencies cannot do without."""
    table = "model.rope_scaling"
    if not any(key.startswith(f"{table}.") for key in view.entries) or NAMED_KINDS in view.wrong:
        return
    kind = cast("RopeKind", view.word(NAMED_KINDS))
    for name in NEEDED_BY_KIND[kind]:
        key = f"{table}.{name}"
        if key not in view.wrong and view.value(key) == "none":
            yield MISSING_SETTING.problem(f"{key} is not set, and {kind} needs it", key=key)


def build_model(view: View) -> ModelShape:
    """Return the shape of a model whose settings have all been checked."""
    parts: dict[str, Any] = {
        name: record(view, kind, f"model.{name}") if view.has_table(f"model.{name}") else None
        for name, kind in PARTS.items()
    }
    parts["rotary"] = record(view, Rotary, "model.rotary")
    parts["multipliers"] = record(view, Multipliers, "model.multipliers")
    return record(view, ModelShape, "model", lora=read_lora(view), **parts)


RANK_KEY, ALPHA_KEY, TARGETS_KEY = "lora.rank", "lora.alpha", "lora.targets"
RSLORA_KEY, DROPOUT_KEY = "lora.rslora", "lora.dropout"


def has_lora(view: View) -> bool:
    """Return whether adapters are trained, and nothing else."""
    return view.value(RANK_KEY) != "none"


def read_lora(view: View) -> Lora | None:
    """Return the adapters of a model; None where all of its weights are trained."""
    if not has_lora(view):
        return None
    return record(view, Lora, "lora", targets=lora_targets(view))


def lora_targets(view: View) -> tuple[str, ...]:
    """Return the layers with an adapter, in forward order; "all-linear" are all there are."""
    asked = view.value(TARGETS_KEY)
    if asked == ALL_LINEAR:
        return lora_linears(view)
    words = cast("list[str]", asked)
    return tuple(name for name in LORA_LINEARS if name in words)


def lora_linears(view: View) -> tuple[str, ...]:
    """Return the linear layers of the model that may have an adapter, in forward order.

    An MLP without a gate has no "gate", latent attention without a vector of queries no "q_down".
    """
    gated = view.flag("model.gated")
    mlp = tuple(name for name in MLP_LINEARS if gated or name != "gate")
    if not view.has_table("model.latent"):
        return (*ATTENTION_LINEARS, *mlp)
    compressed = view.value("model.latent.query_rank") != "none"
    latent = tuple(name for name in LATENT_LINEARS if compressed or name != "q_down")
    return (*latent, "o", *mlp)
