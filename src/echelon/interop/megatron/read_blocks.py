# SPDX-License-Identifier: Apache-2.0
"""What blocks like those of gpt-oss have, of a Megatron-LM command: windows, sinks, gates, biases.

Megatron-LM core 0.16: transformer/utils.py for layers with a window, dot_product_attention.py for
what softmax is offset by, mlp.py and moe/experts.py for gates, moe/router.py for biases.
"""

from __future__ import annotations

import ast
import re
from typing import cast

from echelon.interop.import_context import ImportContext
from echelon.interop.key_reader import COUNT, NUMBER, POSITIVE, KeyReader

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


def _set(reader: KeyReader, key: str, name: str, value: object, why: str) -> None:
    reader.set_or_default(key, f"model.{name}", value, why)
