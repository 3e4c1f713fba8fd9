"""Settings of the model -> ModelShape: presets and config.json expanded, the rest derived."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from echelon.config.entries import Entry
from echelon.config.expert_balance import HAS_BIAS
from echelon.config.experts import BALANCE_KEY, BIAS_KEY
from echelon.config.gather import model_preset_problem, preset_entries
from echelon.config.hugging_face import read_hf_config
from echelon.config.presets import read_preset
from echelon.config.schema import MODEL_SOURCES
from echelon.config.view import Unavailable, View, record
from echelon.core.errors import Problem
from echelon.core.model_shape import Experts, LatentAttention, ModelShape, RopeScaling
from echelon.core.rulebook.config import MISSING_SETTING
from echelon.core.rulebook.model import (
    EXPERTS_ENOUGH,
    HEADS_DIVIDE_HIDDEN,
    KV_HEADS_DIVIDE_HEADS,
    ROPE_NEEDS_EVEN_HEAD,
    ROPE_SCALING_ORDER,
    VOCABULARY_HOLDS_TOKENIZER,
)
from echelon.core.rules import nearest_divisors

REQUIRED = ("layers", "hidden", "heads", "ffn", "vocab", "max_positions")
BYTES_VOCABULARY = 257  # 256 bytes, and the end of a document: train/data/tokenizer.py
LATENT_PARTS = ("model.latent.nope_dim", "model.latent.rope_dim")
NAMED_EXPERTS = ("model.experts.num_experts", "model.experts.top_k", "model.experts.ffn")
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
        name = str(named.value)
        preset = read_preset("models", name)
        assert preset is not None
        below = {k: e for k, e in preset_entries(preset).items() if k.startswith("model.")}
    else:
        path = View(entries=entries).path("model.hf_config")
        below, problems = read_hf_config(path, named.source)
        if problems:
            return dict(entries), problems
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
            works=('model.preset = "gpt2"', 'model.hf_config = "PATH/config.json"'),
        )
        return
    for name in REQUIRED:
        key = f"model.{name}"
        if not view.has(key) and key not in view.wrong:
            yield MISSING_SETTING.problem(f"{key} is not set and has no default", key=key)
    for part, kind in PARTS.items():
        keys = {f"model.{part}.{field.name}" for field in fields(kind)}
        if any(key in view.entries for key in keys):
            for key in sorted(keys - view.wrong):
                if not view.has(key):
                    yield MISSING_SETTING.problem(f"{key} is not set and has no default", key=key)


def heads_divide_hidden(view: View) -> Iterator[Problem]:
    """Check that the width of a head is a whole number."""
    hidden, heads = view.integer("model.hidden"), view.integer("model.heads")
    if not view.has("model.head_dim") and hidden % heads:
        below = hidden - hidden % (2 * heads)  # An even head, so that rotary positions fit too.
        yield HEADS_DIVIDE_HIDDEN.problem(
            f"model.hidden = {hidden} is not a multiple of model.heads = {heads} "
            f"({hidden} % {heads} = {hidden % heads}), and model.head_dim is not set",
            key="model.hidden",
            set_by=view.set_by("model.hidden", "model.heads"),
            works=[
                *(f"hidden = {n}" for n in (below, below + 2 * heads) if n > 0),
                *(f"heads = {n}" for n in _heads_that_fit(view, hidden, heads)),
            ],
        )


def _heads_that_fit(view: View, hidden: int, heads: int) -> list[int]:
    """Return up to two numbers of heads near this one: even in width, shared by the KV heads."""
    set_kv = view.has("model.kv_heads") and view.integer("model.kv_heads") != heads
    kv_heads = view.integer("model.kv_heads") if set_kv else 1
    near = sorted(nearest_divisors(hidden, heads, limit=8), key=lambda n: abs(n - heads))
    return sorted([n for n in near if hidden // n % 2 == 0 and n % kv_heads == 0][:2])


def kv_heads_divide_heads(view: View) -> Iterator[Problem]:
    """Check that each key/value head serves as many query heads as the others."""
    heads, kv_heads = view.integer("model.heads"), view.integer("model.kv_heads")
    if heads % kv_heads:
        yield KV_HEADS_DIVIDE_HEADS.problem(
            f"model.kv_heads = {kv_heads} does not divide model.heads = {heads} "
            f"({heads} % {kv_heads} = {heads % kv_heads})",
            key="model.kv_heads",
            set_by=view.set_by("model.kv_heads", "model.heads"),
            works=nearest_divisors(heads, kv_heads),
        )


def rope_needs_even_head(view: View) -> Iterator[Problem]:
    """Check that rotary positions find pairs of dims."""
    if view.word("model.positions") != "rope":
        return
    for key in ("model.latent.rope_dim", "model.head_dim"):
        if view.has(key):
            width = view.integer(key)
            if width % 2:
                yield ROPE_NEEDS_EVEN_HEAD.problem(
                    f"{key} = {width} is odd, and rotary positions turn pairs of dims",
                    key=key,
                    set_by=view.set_by(key),
                    works=(width - 1, width + 1),
                )
            return


def rope_scaling_order(view: View) -> Iterator[Problem]:
    """Check that there is something between what is stretched and what is kept."""
    if not view.has_table("model.rope_scaling"):
        return
    low_key = "model.rope_scaling.low_frequency_factor"
    high_key = "model.rope_scaling.high_frequency_factor"
    low, high = view.number(low_key), view.number(high_key)
    if low >= high:
        yield ROPE_SCALING_ORDER.problem(
            f"{low_key} = {low:g} is not below high_frequency_factor = {high:g}",
            key=low_key,
            set_by=view.set_by(low_key, high_key),
        )


def experts_enough(view: View) -> Iterator[Problem]:
    """Check that a token finds its top k experts, in some block."""
    if not view.has_table("model.experts"):
        return
    count, top_k = view.integer("model.experts.num_experts"), view.integer("model.experts.top_k")
    if top_k > count:
        yield EXPERTS_ENOUGH.problem(
            f"model.experts.top_k = {top_k} is more than num_experts = {count}",
            key="model.experts.top_k",
            set_by=view.set_by("model.experts.top_k", "model.experts.num_experts"),
            works=(f"1 to {count}",),
        )
    dense, layers = view.integer("model.experts.first_dense_layers"), view.integer("model.layers")
    if dense >= layers:
        yield EXPERTS_ENOUGH.problem(
            f"model.experts.first_dense_layers = {dense} leaves none of {layers} blocks to experts",
            key="model.experts.first_dense_layers",
            set_by=view.set_by("model.experts.first_dense_layers", "model.layers"),
            works=(f"0 to {layers - 1}",),
        )


def vocabulary_holds_tokenizer(view: View) -> Iterator[Problem]:
    """Check that every id of the tokenizer is in the vocabulary, where its size is known.

    A prepared folder of tokens has a tokenizer of its own, which is checked when it is opened.
    """
    name = view.word("data.tokenizer")
    if view.word("data.source") != "stdlib" and view.is_default("data.tokenizer"):
        return
    trained = re.fullmatch(r"bpe-(\d{1,9})", name)
    if name != "bytes" and trained is None:
        return
    needed = int(trained[1]) if trained else BYTES_VOCABULARY
    vocab = view.integer("model.vocab")
    if vocab < needed:
        yield VOCABULARY_HOLDS_TOKENIZER.problem(
            f"model.vocab = {vocab}, but the tokenizer {name} has {needed} ids",
            key="model.vocab",
            set_by=view.set_by("model.vocab", "data.tokenizer"),
            works=(f"model.vocab = {needed}",),
        )


MODEL_CHECKS = (
    vocabulary_holds_tokenizer,
    heads_divide_hidden,
    kv_heads_divide_heads,
    rope_needs_even_head,
    rope_scaling_order,
    experts_enough,
)


def build_model(view: View) -> ModelShape:
    """Return the shape of a model whose settings have all been checked."""
    parts: dict[str, Any] = {
        name: record(view, kind, f"model.{name}") if view.has_table(f"model.{name}") else None
        for name, kind in PARTS.items()
    }
    for name in ("window", "soft_cap"):
        value = view.value(f"model.{name}")
        parts[name] = None if value == "none" else value
    return record(view, ModelShape, "model", **parts)
