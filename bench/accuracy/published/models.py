"""The sizes of a row's model, with what is blank taken from the model's name, or its parameters.

A table rarely gives the width of a head, shared experts or tied embeddings: these are the preset's
where its sizes are the row's, and else those of the family (a gated MLP: Llama's; else GPT-2's).
"""

from __future__ import annotations

import math
import re
from typing import Any, cast

from bench.accuracy.published.known_models import Sizes, known_model
from bench.accuracy.published.rows import MOST, Refused, Row
from echelon.core.attention_mask import AttentionMask
from echelon.core.rulebook.config import MISSING_SETTING, OUT_OF_RANGE
from echelon.cost.inputs.numbers import ModelNumbers

WIDTH_PER_LAYER = 128.0
"""Hidden size over layers of most published decoders, where neither is given."""
MOST_SHARED = 4
USUAL_TOP_K = 2.0
SHARED_POWER = 0.85
"""Of published mixtures, a token meets (experts of a token / experts) to this power of all."""
LEAST_WIDTH = 64.0
ALIGNED = 256.0
"""Widths of gated MLPs are multiples of it."""
USUAL_LENGTH = 2048.0
USUAL_HEADS = (64.0, 128.0)
SAME_SIZE = 1.05
"""A preset whose layers x hidden^2 is within this factor of the row's is the row's model."""


def model_of(row: Row) -> ModelNumbers:
    """Return the sizes of a row's model and its sequences; Refused where they are unknown."""
    known = known_model(row.word("model"))
    gated = _gated(row, known)
    vocab = _size(row, known, "vocab", "vocab", 50257.0, "the vocabulary of GPT-2")
    layers, hidden = _depth_and_width(row, known, vocab, gated)
    same = _is_same(known, layers, hidden)
    heads, head_dim = _heads(row, known if same else {}, hidden)
    kv_heads = _size(row, known if same else {}, "kv_heads", "kv_heads", heads, "as many as heads")
    inner = known if same else {}
    attention = 2.0 * hidden * head_dim * (heads + kv_heads)
    experts = _experts(row, inner, (layers, hidden, vocab), attention)
    whole = gated and not experts["experts"]
    gate = _gated_width(row, (layers, hidden, vocab), attention)
    usual = gate if whole else (0.0 if experts["experts"] else 4.0 * hidden)
    ffn = _size(row, inner, "ffn_hidden", "ffn", usual, "the width of the family's MLP")
    length = _length(row)
    latent = _latent(inner, heads)
    query_dim = heads * head_dim
    value_dim = latent.get("value_dim", query_dim)
    window = int(inner.get("window", 0) or 0)
    plain = 0.0 if gated else 1.0
    return ModelNumbers(
        layers=layers,
        hidden=hidden,
        heads=heads,
        query_dim=query_dim,
        kv_dim=kv_heads * head_dim,
        attention_dim=(query_dim + value_dim) / 2.0,
        ffn=ffn,
        up=2.0 if gated else 1.0,
        vocab=vocab,
        tied=float(_tied(row, bool(inner.get("tied", not gated)))),
        positions=length * plain,
        length=length,
        keys_per_query=_reach(length, window),
        norm_weights=1.0 + plain,
        qkv_bias=plain,
        output_bias=plain,
        mlp_bias=plain,
        head_norms=2.0 * head_dim * float(_norms_heads(row, known)),
        **latent,
        **experts,
    )


def _tied(row: Row, usual: bool) -> bool:
    """Return whether the head is the embedding: the row's, in a column or in words, else usual."""
    said = row.flag("tied")
    if said is not None:
        return said
    words = re.search(r"\b(un)?tied\b", row.word("compile_fusion_notes").lower())
    return not words[1] if words else usual


def _norms_heads(row: Row, known: Sizes) -> bool:
    """Return whether queries and keys are normed: a note's words, else as in the known model."""
    said = re.search(r"\b(no )?qk[ -](?:layer)?norm", row.word("compile_fusion_notes").lower())
    return not said[1] if said else bool(known.get("qk_norm", False))


def _gated(row: Row, known: Sizes) -> bool:
    said = row.flag("gated_mlp")
    if said is not None:
        return said
    if known:
        row.say("gated_mlp", bool(known.get("gated", True)), "of the model by this name")
        return bool(known.get("gated", True))
    gated = "gpt" not in row.word("model").lower()
    row.say("gated_mlp", gated, "models named GPT have none, others since 2023 do")
    return gated


def _size(row: Row, known: Sizes, column: str, key: str, default: float, why: str) -> float:
    value = row.count(column)
    if value is not None:
        return value
    if known.get(key):
        return row.assume(column, float(known[key]), "of the model by this name")
    return row.assume(column, default, why)


def _depth_and_width(row: Row, known: Sizes, vocab: float, gated: bool) -> tuple[float, float]:
    layers, hidden = row.count("layers"), row.count("hidden")
    params = row.positive("params_total") or _params_in_name(row)
    name_only = row.positive("params_total") is None
    known = known if _has_size(known, params) else {}
    if layers is None and known:
        layers = row.assume("layers", float(known["layers"]), "of the model by this name")
    if hidden is None and known:
        hidden = row.assume("hidden", float(known["hidden"]), "of the model by this name")
    if layers is not None and hidden is not None:
        if layers * hidden > MOST:
            raise Refused(OUT_OF_RANGE, f"{layers:g} layers x hidden {hidden:g} is above {MOST:g}")
        return layers, hidden
    if name_only and params is not None:
        row.assume("params_total", params, "of the model's name")
    if params is None:
        raise Refused(MISSING_SETTING, "layers or hidden are blank, and no size tells them")
    params = _met(row, params)
    ratio = (row.count("ffn_hidden") or 0.0) / (hidden or 1.0)
    ends = 2.0 if gated else 1.0
    why = "of the model's parameters"
    if hidden is not None:
        each = hidden * hidden * (4.0 + (2.0 + gated) * ratio if ratio else 12.0)
        left = max(params - ends * vocab * hidden, each)
        return row.assume("layers", _near_multiple(left / each, row.count("pp")), why), hidden
    if layers is not None:
        half = ends * vocab / (24.0 * layers)
        width = math.sqrt(params / (12.0 * layers) + half * half) - half
        return layers, row.assume("hidden", 128.0 * max(1, round(width / 128.0)), why)
    width = 128.0 * max(1, round((params * WIDTH_PER_LAYER / 12.0) ** (1 / 3) / 128.0))
    depth = max(1.0, round((params - ends * vocab * width) / (12.0 * width * width)))
    return row.assume("layers", float(depth), why), row.assume("hidden", width, why)


def _met(row: Row, params: float) -> float:
    """Return the parameters that a token meets: all of a dense model, some of a mixture."""
    experts = row.count("moe_experts") or 1.0
    given = row.positive("params_active") or _active_in_name(row)
    if given or experts <= 1.0:
        return given if given and experts > 1.0 else params
    share = min(1.0, (row.count("moe_topk") or USUAL_TOP_K) / experts) ** SHARED_POWER
    return row.assume("params_active", share * params, "as of mixtures with so many experts")


def _active_in_name(row: Row) -> float | None:
    """Return what a mixture's name says that a token meets: 3e9 of ``30B-A3B``."""
    found = re.search(r"\dB[\s-]*A(\d+(?:\.\d+)?)B", row.word("model"), re.IGNORECASE)
    return float(found[1]) * 1e9 if found else None


def _params_in_name(row: Row) -> float | None:
    found = re.search(r"(\d+(?:\.\d+)?)\s*([BMT])\b", row.word("model"), re.IGNORECASE)
    if not found:
        return None
    return float(found[1]) * {"M": 1e6, "B": 1e9, "T": 1e12}[found[2].upper()]


def _near_multiple(layers: float, stages: float | None) -> float:
    """Return the number of layers, as a multiple of the stages if one is within 5 %."""
    if stages:
        multiple = max(1.0, round(layers / stages)) * stages
        if abs(multiple / layers - 1.0) <= 0.05:
            return multiple
    return float(max(1, round(layers)))


def _has_size(known: Sizes, params: float | None) -> bool:
    """Return whether a preset can be of so many parameters (a mixture's are not counted)."""
    if not known or params is None or "experts" in known:
        return bool(known)
    hidden, layers = float(known["hidden"]), float(known["layers"])
    rough = 12.0 * layers * hidden * hidden + float(known["vocab"]) * hidden
    return 0.6 <= rough / params <= 1.5


def _is_same(known: Sizes, layers: float, hidden: float) -> bool:
    if not known:
        return False
    mine, theirs = layers * hidden**2, float(known["layers"]) * float(known["hidden"]) ** 2
    return max(mine / theirs, theirs / mine) <= SAME_SIZE


def _heads(row: Row, known: Sizes, hidden: float) -> tuple[float, float]:
    """Return the number of query heads and the width of each."""
    heads = row.count("heads")
    if heads is None:
        tp = row.count("tp") or 1.0
        usual = _usual_heads(hidden, tp)
        heads = _size(row, known, "heads", "heads", usual, "heads of 128, so many as tp divides")
    given = row.count("head_dim") or float(known.get("head_dim", 0) or 0)
    latent = cast("dict[str, Any]", known.get("latent", {}))
    if latent:
        given = float(latent["nope_dim"] + latent["rope_dim"])
    if given:
        return heads, given
    width = hidden / heads
    if width == int(width) and (width % 8 == 0 or width >= min(USUAL_HEADS)):
        return heads, width
    near = min(USUAL_HEADS, key=lambda usual: abs(math.log(usual / width)))
    if not 0.5 <= near / width <= 2.0:
        near = float(round(width))
    return heads, row.assume("head_dim", near, "hidden / heads is no usual width")


def _usual_heads(hidden: float, tp: float) -> float:
    """Return the number of heads that tp and hidden can be divided by, of about 128 each."""
    wanted = max(1.0, hidden / 128.0)
    most = int(min(hidden, 8.0 * wanted))
    fits = [n for n in range(1, most + 1) if hidden % n == 0 and n % tp == 0]
    return float(min(fits, key=lambda n: abs(math.log(n / wanted)), default=max(tp, wanted)))


def _gated_width(row: Row, sizes: tuple[float, float, float], attention: float) -> float:
    """Return the width of a gated MLP that makes up the model's size, or 8/3 of the hidden one."""
    layers, hidden, vocab = sizes
    width = 8.0 * hidden / 3.0
    total = row.positive("params_total")
    if total is not None:
        inner = (total - 2.0 * vocab * hidden) / layers - attention
        width = inner / (3.0 * hidden) if inner > hidden * hidden else width
    return max(1.0, round(width / ALIGNED)) * ALIGNED


def _length(row: Row) -> float:
    length = row.count("seq_len")
    if length is None:
        return row.assume("seq_len", USUAL_LENGTH, "the length of most published runs")
    in_units = re.fullmatch(r"(\d+)\s*k(?:i)?", row.word("seq_len").lower())
    return 1024.0 * float(in_units[1]) if in_units else length


def _reach(length: float, window: int) -> float:
    """Return the mean number of keys that a query meets; its own counts half."""
    mask = AttentionMask(causal=True, window=window or None)
    return mask.num_pairs(int(length)) / length - 0.5


def _experts(
    row: Row, known: Sizes, sizes: tuple[float, float, float], attention: float
) -> dict[str, float]:
    layers, hidden, vocab = sizes
    table = cast("dict[str, Any]", known.get("experts", {}))
    experts = row.count("moe_experts") or float(table.get("num_experts", 0))
    if experts <= 1.0:
        return dict.fromkeys(("experts", "top_k", "expert_ffn", "shared_experts"), 0.0)
    top_k = _size(
        row, table, "moe_topk", "top_k", USUAL_TOP_K, "the usual number of experts of a token"
    )
    width = _size(row, table, "moe_ffn", "ffn", *_expert_width(row, sizes, attention, experts))
    if table:
        shared = float(table.get("shared_experts", 0))
    else:
        # What a token meets beside attention, its experts and one and a half vocabularies.
        rest = (row.positive("params_active") or 0.0) - 1.5 * vocab * hidden
        shared = round((rest / layers - attention) / (3.0 * hidden * width) - top_k)
        shared = float(min(max(shared, 0), MOST_SHARED))
        if shared:
            row.assume("shared_experts", shared, "of the parameters that a token meets")
    return {
        "experts": experts,
        "top_k": top_k,
        "expert_ffn": width,
        "shared_experts": shared,
        "dense_layers": float(table.get("first_dense_layers", 0)),
    }


def _expert_width(
    row: Row, sizes: tuple[float, float, float], attention: float, experts: float
) -> tuple[float, str]:
    """Return the width of an expert that makes up the model's size, else that of a dense MLP."""
    layers, hidden, vocab = sizes
    total = row.positive("params_total") or _params_in_name(row)
    if total and not row.count("ffn_hidden"):
        each = ((total - 2.0 * vocab * hidden) / layers - attention) / (3.0 * hidden * experts)
        if each > LEAST_WIDTH:
            return LEAST_WIDTH * round(each / LEAST_WIDTH), "of the model's parameters"
    return row.count("ffn_hidden") or 4.0 * hidden, "the width of the dense MLP"


def _latent(known: Sizes, heads: float) -> dict[str, float]:
    latent = cast("dict[str, Any]", known.get("latent", {}))
    if not latent:
        return {}
    nope, value = float(latent["nope_dim"]), float(latent["value_dim"])
    return {
        "query_rank": float(latent["query_rank"]),
        "kv_rank": float(latent["kv_rank"] + latent["rope_dim"]),
        "rope_dim": float(latent["rope_dim"]),
        "kv_up_dim": heads * (nope + value),
        "value_dim": heads * value,
    }
