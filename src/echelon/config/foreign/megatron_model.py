"""The model of a Megatron-LM command: what it says, and what Megatron-LM has where it is silent.

Where the run builds on a model (--extends), what the command does not say is that model's.
"""

from __future__ import annotations

import re

from echelon.config.foreign.ledger import COUNT, POSITIVE, Ledger
from echelon.config.foreign.megatron_latent import CHANNELS, read_latent
from echelon.config.foreign.surroundings import Surroundings
from echelon.config.kinds import Real
from echelon.core.rulebook.imports import IMPORT_NOT_HONOURED

FRACTION = Real(below=True, maximum=1.0)
POSITIONS = {"learned_absolute": "learned", "rope": "rope"}
NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
BIASES = ("qkv_bias", "output_bias", "mlp_bias")
VOCAB_MULTIPLE = 128

SIZES = {
    "--num-layers": ("layers", "blocks"),
    "--hidden-size": ("hidden", "width of the residual stream"),
    "--num-attention-heads": ("heads", "query heads"),
    "--kv-channels": ("head_dim", "width of a head"),
    "--max-position-embeddings": ("max_positions", "longest sequence"),
}


def read_model(ledger: Ledger, around: Surroundings) -> int | None:
    """Map the model, and return how many layers it has, where that is known."""
    complete = around.model is None
    latent = read_latent(ledger)
    for key, (name, why) in SIZES.items():
        if latent and key == CHANNELS:
            continue
        if (size := ledger.whole(key, COUNT, setting=f"model.{name}")) is not None:
            ledger.set(key, f"model.{name}", size, why)
    _read_heads(ledger, complete, latent=latent)
    gated = _read_activation(ledger, complete)
    _read_ffn(ledger, gated, complete)
    _read_vocab(ledger, around)
    _read_norm(ledger, complete)
    _read_positions(ledger, complete)
    _read_window(ledger)
    _read_biases(ledger, complete)
    _read_dropout(ledger, complete)
    key = "--untie-embeddings-and-output-weights"
    untied = ledger.flag(key, setting="model.tied")
    if untied is not None or complete:
        _set(ledger, key, "tied", not untied, "whether the head is the embedding")
    key = "--init-method-std"
    if (std := ledger.number(key, POSITIVE, setting="model.initial_std")) is not None:
        ledger.set(key, "model.initial_std", std, "of the first weights")
    layers = ledger.given.get("--num-layers")
    if isinstance(layers, int):
        return layers
    return around.model.layers if around.model else None


def _set(ledger: Ledger, key: str, name: str, value: object, why: str) -> None:
    source = "" if ledger.has(key) else ledger.default
    ledger.set(key, f"model.{name}", value, why, source=source)


def _read_heads(ledger: Ledger, complete: bool, *, latent: bool) -> None:
    grouped, key = "--group-query-attention", "--num-query-groups"
    on = ledger.flag(grouped, setting="model.kv_heads")
    groups = ledger.whole(key, COUNT, setting="model.kv_heads")
    if on:
        ledger.skip(grouped, f"{key} says how many")
        if groups is not None or complete:
            _set(ledger, key, "kv_heads", groups or 1, "key/value heads")
    else:
        ledger.skip(key, f"it counts with {grouped} only")
    key = "--qk-layernorm"
    if not latent and ledger.flag(key, setting="model.qk_norm"):
        if complete and ledger.given.get("--normalization") != "RMSNorm":
            why = "queries and keys have RMS norms"
            ledger.refuse(key, why, works=("--normalization RMSNorm",), setting="model.qk_norm")
        else:
            ledger.set(key, "model.qk_norm", True, "queries and keys are normed per head")


def _read_activation(ledger: Ledger, complete: bool) -> bool:
    key = "--swiglu"
    gated = ledger.flag(key, setting="model.gated")
    if gated is None and not complete:
        return False
    _set(ledger, key, "gated", bool(gated), "whether the MLP has a gate")
    _set(ledger, key, "activation", "silu" if gated else "gelu", "gelu is the tanh form")
    return bool(gated)


def _read_ffn(ledger: Ledger, gated: bool, complete: bool) -> None:
    key = "--ffn-hidden-size"
    ffn = ledger.whole(key, COUNT, setting="model.ffn")
    hidden = ledger.given.get("--hidden-size")
    if ffn is not None:
        ledger.set(key, "model.ffn", ffn, "inner width of the MLP")
    elif complete and isinstance(hidden, int) and not ledger.has(key):
        size = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
        why = "4 hidden x 2/3, in steps of 64" if gated else "4 hidden"
        _set(ledger, key, "ffn", size, why)


def _read_vocab(ledger: Ledger, around: Surroundings) -> None:
    padded, key, multiple = (
        "--padded-vocab-size",
        "--vocab-size",
        "--make-vocab-size-divisible-by",
    )
    step = ledger.whole(multiple, COUNT) or VOCAB_MULTIPLE
    size = ledger.whole(padded, COUNT, setting="model.vocab")
    plain = ledger.whole(key, COUNT, setting="model.vocab")
    if size is not None:
        ledger.set(padded, "model.vocab", size, "token ids")
        ledger.skip(key, f"{padded} says it")
    elif plain is not None:
        step *= around.degrees["tp"]
        size = -(-plain // step) * step
        why = f"{plain} in steps of {step // around.degrees['tp']} x tp {around.degrees['tp']}"
        ledger.set(key, "model.vocab", size, why)
    ledger.skip(multiple, "model.vocab is padded by it")


def _read_norm(ledger: Ledger, complete: bool) -> None:
    key = "--normalization"
    norm = ledger.word(key, NORMS, setting="model.norm")
    if norm is not None or (complete and not ledger.has(key)):
        _set(ledger, key, "norm", NORMS[norm or "LayerNorm"], "kind of norm")
    key = "--norm-epsilon"
    epsilon = ledger.number(key, POSITIVE, setting="model.norm_eps")
    if epsilon is not None or (complete and not ledger.has(key)):
        _set(ledger, key, "norm_eps", epsilon or 1e-5, "added to the variance")


def _read_positions(ledger: Ledger, complete: bool) -> None:
    key, old = "--position-embedding-type", "--use-rotary-position-embeddings"
    kind = ledger.word(key, POSITIONS, setting="model.positions")
    rotary = ledger.flag(old, setting="model.positions")
    if kind is not None:
        ledger.set(key, "model.positions", POSITIONS[kind], "how order enters")
    if rotary:
        ledger.set(old, "model.positions", "rope", "how order enters")
    elif kind is None and complete and not ledger.has(key):
        _set(ledger, key, "positions", "learned", "how order enters")
    entry = ledger.entries.get("model.positions")
    learned = entry is not None and entry.value == "learned"
    base, scaling, factor = "--rotary-base", "--use-rope-scaling", "--rope-scaling-factor"
    if learned:
        for name in (base, scaling, factor):
            ledger.skip(name, "positions are learned")
        return
    if (theta := ledger.number(base, POSITIVE, setting="model.rope_theta")) is not None:
        ledger.set(base, "model.rope_theta", theta, "base of the rotary frequencies")
    stretch = ledger.number(factor, Real(minimum=1.0), setting="model.rope_scaling.factor")
    if ledger.flag(scaling, setting="model.rope_scaling.factor"):
        for name, value in (
            ("factor", stretch or 8.0),
            ("low_frequency_factor", 1.0),
            ("high_frequency_factor", 4.0),
            ("original_positions", 8192),
        ):
            ledger.set(scaling, f"model.rope_scaling.{name}", value, "as Llama 3.1 has it")
        ledger.skip(factor, f"together with {scaling}")
    else:
        ledger.skip(factor, f"it counts with {scaling} only")


def _read_window(ledger: Ledger) -> None:
    """Map a window: Megatron-LM counts the keys before the query, here the query's own counts."""
    key = "--window-size"
    if not ledger.has(key):
        return
    found = re.fullmatch(r"\(?(-1|\d{1,12}), ?0\)?", str(ledger.given[key]))
    if found and found[1] == "-1":
        ledger.set(key, "model.window", "none", "-1 is all keys before a query")
    elif found:
        why = f"the {found[1]} keys before a query, and its own"
        ledger.set(key, "model.window", int(found[1]) + 1, why)
    else:
        why = "a window is a number of keys before the query, and none behind it"
        ledger.refuse(key, why, works=(f"{key} 128,0",), setting="model.window")


def _read_biases(ledger: Ledger, complete: bool) -> None:
    key, qkv = "--disable-bias-linear", "--add-qkv-bias"
    off = ledger.flag(key, setting="model.mlp_bias")
    on = ledger.flag(qkv, setting="model.qkv_bias")
    if off is not None or complete:
        for name in BIASES:
            if not (on and name == "qkv_bias"):
                _set(ledger, key, name, not off, "whether there is a bias")
    if on:
        ledger.set(qkv, "model.qkv_bias", True, "q, k and v have a bias")


def _read_dropout(ledger: Ledger, complete: bool) -> None:
    key = "--hidden-dropout"
    dropout = ledger.number(key, FRACTION, setting="model.dropout")
    if dropout is not None or (complete and not ledger.has(key)):
        value = 0.1 if dropout is None else dropout
        _set(ledger, key, "dropout", value, "of both outputs of a block")
    key, why = "--attention-dropout", "there is no dropout inside attention"
    ledger.only(key, (0, 0.0), why)
    if complete and not ledger.has(key):
        ledger.problems.append(
            IMPORT_NOT_HONOURED.problem(
                f"{key} is not set, and Megatron-LM's default is 0.1: {why}",
                key=key,
                set_by=ledger.path,
                works=(f"{key} 0", "--extends MODEL"),
            )
        )
