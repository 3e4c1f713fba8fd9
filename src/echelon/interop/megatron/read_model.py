# SPDX-License-Identifier: Apache-2.0
"""The model of a Megatron-LM command: what it says, and what Megatron-LM has where it is silent.

Where the run builds on a model (--extends), what the command does not say is that model's.

Windows, sinks, gates and biases are those of gpt-oss in Megatron-LM core 0.16:
transformer/utils.py for layers with a window, dot_product_attention.py for what softmax is offset
by, mlp.py and moe/experts.py for gates, moe/router.py for biases.
"""

from __future__ import annotations

import ast
import re
from typing import cast

from echelon.core.rulebook.interop import IMPORT_NOT_HONOURED
from echelon.core.settings.value_types import Real
from echelon.interop.abilities import by_word
from echelon.interop.import_context import ImportContext
from echelon.interop.key_reader import BETA, COUNT, NUMBER, POSITIVE, KeyReader
from echelon.interop.megatron.abilities import NORMS, POSITIONS, TABLES

_VOCAB_MULTIPLE = 128  # tokens, in Megatron-LM

_SIZES = {
    "--num-layers": ("layers", "blocks"),
    "--hidden-size": ("hidden", "width of the residual stream"),
    "--num-attention-heads": ("heads", "query heads"),
    "--kv-channels": ("head_dim", "width of a head"),
    "--max-position-embeddings": ("max_positions", "longest sequence"),
}

LATENT, NORM, ROPE = "--multi-latent-attention", "--qk-layernorm", "--rope-type"
QUERY, CHANNELS = "--q-lora-rank", "--kv-channels"
_LATENT_SIZES: dict[str, tuple[str, int | None, str]] = {
    QUERY: ("query_rank", None, "rank of the query projection"),
    "--kv-lora-rank": ("kv_rank", 32, "rank of the key/value projection"),
    "--qk-head-dim": ("nope_dim", 128, "head dim without rotary positions"),
    "--qk-pos-emb-head-dim": ("rope_dim", 64, "head dim with rotary positions"),
    "--v-head-dim": ("value_dim", 128, "head dim of the values"),
}
YARN = ("--rotary-scaling-factor", "--mscale", "--mscale-all-dim", "--beta-fast", "--beta-slow")

EXPERTS, FREQUENCY = "--num-experts", "--moe-layer-freq"
SHARED = "--moe-shared-expert-intermediate-size"
SWIGLU, QUICK = "--swiglu", "--quick-geglu"
CLAMP, OFFSET = "--activation-func-clamp-value", "--glu-linear-offset"
GROUPED, UNFUSED = "--moe-grouped-gemm", "--no-bias-gelu-fusion"
WINDOW, SKIP, SOFTMAX = "--window-size", "--window-attn-skip-freq", "--softmax-type"
UNBIASED, QKV = "--disable-bias-linear", "--add-qkv-bias"
QUICK_ALPHA = 1.702
"""A gate g of --quick-geglu is g sigmoid(alpha g)."""
MOST_LAYERS = 10_000
"""Longer patterns are none."""
_SINKS = {"vanilla": False, "learnable": True}


def read_model(reader: KeyReader, context: ImportContext) -> int | None:
    """Map the model, and return how many layers it has, where that is known."""
    complete = context.model is None
    latent = _read_latent(reader)
    for key, (name, why) in _SIZES.items():
        if not (latent and key == CHANNELS):
            reader.take(key, f"model.{name}", COUNT, why)
    _read_heads(reader, complete, latent=latent)
    silu = read_activation(reader, context)
    _read_ffn(reader, silu, complete)
    _read_vocab(reader, context)
    _read_norm(reader, complete)
    _read_positions(reader, complete)
    layers = reader.given.get("--num-layers")
    if not isinstance(layers, int):
        layers = context.model.layers if context.model else None
    read_window(reader, layers, context)
    read_softmax(reader, latent=latent)
    read_biases(reader, context)
    _read_dropout(reader, complete)
    key = "--untie-embeddings-and-output-weights"
    untied = reader.flag(key, setting="model.tied")
    if untied is not None or complete:
        _set(reader, key, "tied", not untied, "whether the head is the embedding")
    reader.take("--init-method-std", "model.initial_std", POSITIVE, "of the first weights")
    return layers


def _set(reader: KeyReader, key: str, name: str, value: object, why: str) -> None:
    reader.set_or_default(key, f"model.{name}", value, why)


def _read_latent(reader: KeyReader) -> bool:
    """Map latent attention; return whether there is any.

    Both compressed vectors are normed here, as in DeepSeek-V2 (2024, section 2.1); Megatron-LM
    norms them with --qk-layernorm. Its rotary positions of such heads are YaRN's by default.
    """
    sizes = {
        key: reader.integer(key, COUNT, setting=f"model.latent.{_LATENT_SIZES[key][0]}")
        for key in _LATENT_SIZES
    }
    if not reader.flag(LATENT, setting="model.latent"):
        reader.skip_all((*_LATENT_SIZES, *YARN, ROPE), f"it is about {LATENT}")
        return False
    reader.skip(LATENT, "its sizes say the rest")
    for key, (name, default, why) in _LATENT_SIZES.items():
        size = default if sizes[key] is None and not reader.has(key) else sizes[key]
        if size is not None:
            reader.set_or_default(key, f"model.latent.{name}", size, why)
        elif not reader.has(key):
            whole = "queries are compressed too; Megatron-LM leaves them as they are by default"
            reader.refuse(key, whole, suggestions=(f"{key} 1536",), setting=f"model.latent.{name}")
    if not reader.flag(NORM, setting="model.latent"):
        reader.refuse(
            NORM, "compressed vectors are normed", suggestions=(NORM,), setting="model.latent"
        )
    reader.skip(NORM, "compressed vectors are always normed")
    reader.skip(CHANNELS, f"--qk-head-dim and --qk-pos-emb-head-dim say it with {LATENT}")
    _read_rope(reader)
    return True


def _read_rope(reader: KeyReader) -> None:
    """Accept plain rotary positions."""
    if reader.word(ROPE, ("rope", "yarn")) != "rope":
        why = "rotary positions are plain, and YaRN's by default"
        reader.refuse(ROPE, why, suggestions=(f"{ROPE} rope",), setting="model.rope_scaling.factor")
        return
    reader.skip(ROPE, "rotary positions are plain")
    reader.skip_all(YARN, "rotary positions are plain")


def _read_heads(reader: KeyReader, complete: bool, *, latent: bool) -> None:
    grouped, key = "--group-query-attention", "--num-query-groups"
    on = reader.flag(grouped, setting="model.kv_heads")
    groups = reader.integer(key, COUNT, setting="model.kv_heads")
    if on:
        reader.take_part(grouped, f"{key} says how many")
        if groups is not None or complete:
            _set(reader, key, "kv_heads", groups or 1, "key/value heads")
    else:
        reader.skip(key, f"it counts with {grouped} only")
    key = "--qk-layernorm"
    if not latent and reader.flag(key, setting="model.qk_norm"):
        if complete and reader.given.get("--normalization") != "RMSNorm":
            why = "queries and keys have RMS norms"
            reader.refuse(
                key, why, suggestions=("--normalization RMSNorm",), setting="model.qk_norm"
            )
        else:
            reader.set(key, "model.qk_norm", True, "queries and keys are normed per head")


def _read_ffn(reader: KeyReader, silu: bool, complete: bool) -> None:
    """Map the inner width; by default a gate makes it narrower with --swiglu only."""
    key = "--ffn-hidden-size"
    ffn = reader.integer(key, COUNT, setting="model.ffn")
    hidden = reader.given.get("--hidden-size")
    if ffn is not None:
        reader.set(key, "model.ffn", ffn, "inner width of the MLP")
    elif complete and isinstance(hidden, int) and not reader.has(key):
        size = int(4 * hidden * 2 / 3 / 64) * 64 if silu else 4 * hidden
        why = "4 hidden x 2/3, in steps of 64" if silu else "4 hidden"
        _set(reader, key, "ffn", size, why)


def _read_vocab(reader: KeyReader, context: ImportContext) -> None:
    padded, key, multiple = (
        f"--{name}" for name in ("padded-vocab-size", "vocab-size", "make-vocab-size-divisible-by")
    )
    step = reader.integer(multiple, COUNT) or _VOCAB_MULTIPLE
    size = reader.take(padded, "model.vocab", COUNT, "token ids")
    plain = reader.integer(key, COUNT, setting="model.vocab")
    if size is not None:
        reader.skip(key, f"{padded} says it")
    elif plain is not None:
        step *= context.degrees["tp"]
        size = -(-plain // step) * step
        why = f"{plain} in steps of {step // context.degrees['tp']} x tp {context.degrees['tp']}"
        reader.set(key, "model.vocab", size, why)
    elif padded not in reader.given and context.model is None:
        _assume_vocab(reader, step * context.degrees["tp"])
    reader.take_part(multiple, "model.vocab is padded by it")


def _assume_vocab(reader: KeyReader, step: int) -> None:
    """Map a tokenizer that is named without its size, where that is known."""
    named = reader.given.get("--tokenizer-type", "GPT2BPETokenizer")
    plain = TABLES.vocab.get(str(named))
    key = "--tokenizer-type" if "--tokenizer-type" in reader.given else "--vocab-file"
    if plain is not None and key in reader.given:
        reader.assume(f"{plain} token ids, those of {named}")
        reader.set(key, "model.vocab", -(-plain // step) * step, f"{plain} in steps of {step}")


def _read_norm(reader: KeyReader, complete: bool) -> None:
    norm, epsilon = ("layernorm", 1e-5) if complete else (None, None)
    names = by_word(NORMS)
    reader.take("--normalization", "model.norm", names, "kind of norm", default=norm)
    why = "added to the variance"
    reader.take("--norm-epsilon", "model.norm_eps", POSITIVE, why, default=epsilon)


def _read_positions(reader: KeyReader, complete: bool) -> None:
    key, old = "--position-embedding-type", "--use-rotary-position-embeddings"
    setting, why = "model.positions", "how order enters"
    kind = reader.take(key, setting, by_word(POSITIONS), why)
    if reader.flag(old, setting=setting):
        reader.set(old, setting, "rope", why)
    elif kind is None and complete and not reader.has(key):
        _set(reader, key, "positions", "learned", why)
    entry = reader.entries.get("model.positions")
    learned = entry is not None and entry.value == "learned"
    base, scaling, factor = "--rotary-base", "--use-rope-scaling", "--rope-scaling-factor"
    if learned:
        reader.skip_all((base, scaling, factor), "positions are learned")
        return
    reader.take(base, "model.rope_theta", POSITIVE, "base of the rotary frequencies")
    stretch = reader.number(factor, Real(minimum=1.0), setting="model.rope_scaling.factor")
    if reader.flag(scaling, setting="model.rope_scaling.factor"):
        for name, value in (
            ("factor", stretch or 8.0),
            ("low_frequency_factor", 1.0),
            ("high_frequency_factor", 4.0),
            ("original_positions", 8192),
        ):
            reader.set(scaling, f"model.rope_scaling.{name}", value, "as Llama 3.1 has it")
        reader.skip(factor, f"together with {scaling}")
    else:
        reader.skip(factor, f"it counts with {scaling} only")


def _read_dropout(reader: KeyReader, complete: bool) -> None:
    why = "of both outputs of a block"
    reader.take("--hidden-dropout", "model.dropout", BETA, why, default=0.1 if complete else None)
    key, why = "--attention-dropout", "there is no dropout inside attention"
    reader.only(key, (0, 0.0), why)
    if complete and not reader.has(key):
        message = f"{key} is not set, and Megatron-LM's default is 0.1: {why}"
        instead = (f"{key} 0", "--extends MODEL")
        reader.note(IMPORT_NOT_HONOURED, message, key, reader.path, instead)


def layer_pattern(given: object) -> tuple[int, ...] | None:
    """Return the bits of a pattern of layers, as Megatron-LM evaluates it; None for anything else.

    It is a list, or sums and multiples of lists such as ([0]*3+[1]*58) or ([1]*3+[0])*12.
    """
    if isinstance(given, list):
        bits = cast("list[object]", given)
    else:
        try:
            bits = _evaluated(ast.parse(str(given).strip("'\" "), mode="eval").body)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
    if not bits or any(isinstance(bit, bool) or bit not in (0, 1) for bit in bits):
        return None
    return tuple(cast("list[int]", bits))


def _evaluated(node: ast.expr) -> list[object]:
    match node:
        case ast.List(elts=items) if all(isinstance(item, ast.Constant) for item in items):
            return [cast("ast.Constant", item).value for item in items]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            found = _evaluated(left) + _evaluated(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=ast.Constant(value=int(times))) if (
            0 < times <= MOST_LAYERS
        ):
            part = _evaluated(left)
            found = part * times if len(part) * times <= MOST_LAYERS else []
        case _:
            raise ValueError
    if not found or len(found) > MOST_LAYERS:
        raise ValueError
    return found


def has_experts(reader: KeyReader, context: ImportContext) -> bool:
    """Return whether the model has experts: the command says so, or what it builds on has some."""
    return reader.has(EXPERTS) or (context.model is not None and context.model.experts is not None)


def read_activation(reader: KeyReader, context: ImportContext) -> bool:
    """Map what lies inside of an MLP; return whether it has a gate with SiLU."""
    swiglu = reader.flag(SWIGLU, setting="model.gated")
    quick = reader.flag(QUICK, setting="model.gated")
    if quick and swiglu:
        reader.conflict(f"{SWIGLU} and {QUICK}", "model.gated", reader.where(SWIGLU, QUICK))
    elif quick:
        _read_clamped(reader, context)
        return False
    else:
        reader.skip(QUICK, "off")
    if swiglu:
        fused = f"with {SWIGLU} some kernels take it and others do not: it is about {QUICK}"
        reader.only(OFFSET, (0, 0.0), fused, setting="model.activation")
        reader.only(CLAMP, (), fused, setting="model.activation")
    else:
        reader.skip_all((CLAMP, OFFSET), "it is about gates")
    if swiglu is None and context.model is not None:
        return False
    _set(reader, SWIGLU, "gated", bool(swiglu), "whether the MLP has a gate")
    _set(reader, SWIGLU, "activation", "silu" if swiglu else "gelu", "gelu is the tanh form")
    base = context.model.experts if context.model else None
    if base is not None and base.limit is not None:
        reader.set(SWIGLU, "model.experts.limit", "none", "the gate of experts is not clamped")
        reader.set(SWIGLU, "model.experts.alpha", QUICK_ALPHA, "of no gate: the default")
    return bool(swiglu)


def _read_clamped(reader: KeyReader, context: ImportContext) -> None:
    """Map the clamped SwiGLU of experts, (up + 1) gate sigmoid(1.702 gate) within a limit."""
    limit = reader.number(CLAMP, POSITIVE, setting="model.experts.limit")
    offset = reader.number(OFFSET, NUMBER, setting="model.experts.limit") or 0.0
    ordered = [key for key in (GROUPED, UNFUSED) if reader.given.get(key) is True]
    biased = _has_biased_experts(reader, context)
    why, works = "", (SWIGLU, f"{QUICK} {CLAMP} 7.0 {OFFSET} 1.0")
    if not has_experts(reader, context):
        why = f"a dense MLP has SiLU in its gate ({SWIGLU}); that of experts alone may be clamped"
    elif _has_dense_mlps(reader, context):
        why = "dense MLPs and shared experts have SiLU in their gates, and here would have this one"
    elif limit is None or offset != 1.0:
        why = f"the gate of experts is SiLU, or this one with {CLAMP} L and {OFFSET} 1"
    elif biased and not ordered:
        why = "biases of experts are added before the clamp, and there after it where both are one"
        why, works = f"{why} kernel for each expert", (GROUPED, UNFUSED)
    if why:
        reader.refuse(QUICK, why, suggestions=works, setting="model.experts.limit")
        reader.skip_all((CLAMP, OFFSET), f"together with {QUICK}")
        return
    reader.set(QUICK, "model.gated", True, "an expert has a gate")
    reader.set(QUICK, "model.activation", "silu", "that of experts is clamped")
    reader.set(QUICK, "model.experts.alpha", QUICK_ALPHA, "gate x sigmoid(1.702 gate)")
    reader.set(CLAMP, "model.experts.limit", limit, "how large gates may be")
    reader.take_part(OFFSET, "clamped SwiGLU adds 1 to the other factor: model.experts.limit")
    for key in ordered if biased else ():
        reader.take_part(key, "biases are added before the clamp, as here: model.experts.bias")


def _has_biased_experts(reader: KeyReader, context: ImportContext) -> bool:
    """Return whether products of experts have a bias, as `read_biases` maps it."""
    if context.model is None or reader.has(UNBIASED):
        return not reader.given.get(UNBIASED)
    experts = context.model.experts
    return experts is not None and experts.bias


def _has_dense_mlps(reader: KeyReader, context: ImportContext) -> bool:
    """Return whether tokens meet an MLP that no router leads to."""
    base = context.model.experts if context.model else None
    shared = reader.given.get(SHARED, base.shared_experts if base else 0)
    if reader.has(FREQUENCY):
        pattern = layer_pattern(reader.given[FREQUENCY])
        dense = (pattern is None and reader.given[FREQUENCY] != 1) or 0 in (pattern or ())
    else:
        dense = bool(base and base.first_dense_layers)
    return bool(shared) or dense


def read_biases(reader: KeyReader, context: ImportContext) -> None:
    """Map biases of products; those of a model with experts are in experts and in their routers."""
    complete = context.model is None
    off = reader.flag(UNBIASED, setting="model.mlp_bias")
    on = reader.flag(QKV, setting="model.qkv_bias")
    routed = has_experts(reader, context)
    names = ("qkv_bias", "output_bias", "mlp_bias")
    if off is not None or complete:
        biased = not off
        for name in names:
            if not (on and name == "qkv_bias"):
                there = biased and not (routed and name == "mlp_bias")
                _set(reader, UNBIASED, name, there, "whether there is a bias")
        base = context.model.experts if context.model else None
        if routed and (biased or (base and (base.bias or base.logit_bias))):
            for name in ("bias", "logit_bias"):
                _set(reader, UNBIASED, f"experts.{name}", biased, "whether there is a bias")
        if routed and biased and _has_dense_mlps(reader, context):
            why = "experts may have biases, dense MLPs and shared experts beside them have none"
            works = (UNBIASED,)
            reader.refuse(UNBIASED, why, suggestions=works, setting="model.experts.bias")
    if on:
        reader.set(QKV, "model.qkv_bias", True, "q, k and v have a bias")


def read_softmax(reader: KeyReader, *, latent: bool) -> None:
    """Map what stands beside the scores of keys: nothing, or a learned score of each head."""
    word = reader.word(SOFTMAX, (*_SINKS, "off-by-one"), setting="model.sinks")
    if word is None:
        return
    if word == "off-by-one":
        why = "a score beside those of keys is learned; there is none that stays 0"
    elif word == "learnable" and latent:
        why = "heads of latent attention have no learned score beside those of keys"
    else:
        reader.set(SOFTMAX, "model.sinks", _SINKS[word], "a learned score beside those of keys")
        return
    works = (f"{SOFTMAX} vanilla",) if latent else tuple(f"{SOFTMAX} {one}" for one in _SINKS)
    reader.refuse(SOFTMAX, why, suggestions=works, setting="model.sinks")


def read_window(reader: KeyReader, layers: int | None, context: ImportContext) -> None:
    """Map a window: Megatron-LM counts the keys before the query, here the query's own counts."""
    keys = _keys_before(reader)
    if keys is None:
        reader.skip(SKIP, f"it counts with {WINDOW} only")
        if "model.window" in reader.entries:
            _set_alike(reader, WINDOW, "no layer has a window", context)
        return
    kinds = _kinds(reader, layers)
    if kinds is not None and "local" not in kinds:
        reader.set(WINDOW, "model.window", "none", f"{SKIP} leaves no layer with it")
        _set_alike(reader, SKIP, "no layer has a window", context)
        return
    reader.set(WINDOW, "model.window", keys + 1, f"the {keys} keys before a query, and its own")
    if kinds is not None and "global" in kinds:
        reader.set(SKIP, "model.layer_kinds", kinds, "blocks with and without the window")
    elif kinds is not None:
        _set_alike(reader, SKIP, "every layer has the window", context)


def _set_alike(reader: KeyReader, key: str, why: str, context: ImportContext) -> None:
    """Map layers that are all alike: a setting where those of what the run builds on are not."""
    if context.model is not None and context.model.layer_kinds:
        reader.set(key, "model.layer_kinds", "local", why)
    elif key == SKIP:
        reader.skip(SKIP, why)


def _keys_before(reader: KeyReader) -> int | None:
    """Return how many keys before a query it meets; None for all of them, or what is refused."""
    if not reader.has(WINDOW):
        return None
    given = reader.given[WINDOW]
    text = ",".join(map(str, cast("list[object]", given))) if isinstance(given, list) else given
    found = re.fullmatch(r"\(?(-1|\d{1,12}), ?0\)?", str(text))
    if found and found[1] != "-1":
        return int(found[1])
    if found:
        reader.set(WINDOW, "model.window", "none", "-1 is all keys before a query")
    else:
        why = "a window is a number of keys before the query, and none behind it"
        reader.refuse(WINDOW, why, suggestions=(f"{WINDOW} 128,0",), setting="model.window")
    return None


def _kinds(reader: KeyReader, layers: int | None) -> list[str] | None:
    """Return the kinds of the first layers, which repeat; None where all are alike, or refused.

    A number N leaves the window out of each N-th layer; a pattern has a 1 for each layer with it.
    """
    if not reader.has(SKIP):
        return None
    given = reader.given[SKIP]
    if isinstance(given, int) and not isinstance(given, bool):
        every = reader.integer(SKIP, COUNT, setting="model.layer_kinds")
        return None if every is None else ["local"] * (every - 1) + ["global"]
    bits = layer_pattern(given)
    if bits is None or layers not in (None, len(bits)):
        why = "a number, or a 1 for each layer with a window and a 0 for each without"
        reader.refuse(SKIP, why, suggestions=(f"{SKIP} 2",), setting="model.layer_kinds")
        return None
    period = next(n for n in range(1, len(bits) + 1) if bits == (bits[:n] * len(bits))[: len(bits)])
    return ["local" if bit else "global" for bit in bits[:period]]
