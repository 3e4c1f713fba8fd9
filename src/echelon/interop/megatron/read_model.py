# SPDX-License-Identifier: Apache-2.0
"""The model of a Megatron-LM command: what it says, and what Megatron-LM has where it is silent.

Where the run builds on a model (--extends), what the command does not say is that model's.
"""

from __future__ import annotations

from echelon.config.settings.value_types import Real
from echelon.core.rulebook.interop import IMPORT_NOT_HONOURED
from echelon.interop.abilities import by_word
from echelon.interop.import_context import ImportContext
from echelon.interop.key_reader import BETA, COUNT, POSITIVE, KeyReader
from echelon.interop.megatron.abilities import NORMS, POSITIONS, TABLES
from echelon.interop.megatron.read_blocks import (
    read_activation,
    read_biases,
    read_softmax,
    read_window,
)

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
