"""A Hugging Face config.json -> settings of the model, for architectures that are computed exactly.

What is read is the shape. Dropout probabilities tell how a checkpoint was trained and are not read:
`model.dropout` says how yours is. A sliding window of every layer is `model.window`. Where only
some layers slide (Qwen's `max_window_layers`), it shortens `max_positions` to the window, up to
which windowed and full attention are the same. DeepSeek-V3's YaRN is an extension after
pretraining: its shape is read as pretrained, up to the original positions. Released weights went
through that extension, and are refused (weights-positions).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from echelon.config.entries import Entry, check_layer
from echelon.config.files.reading import is_folder, missing_file
from echelon.config.model.config_json import (
    LLAMA3_ROPE,
    PLAIN_ROPE,
    ConfigJsonReader,
    rope_entry,
    rope_type,
)
from echelon.config.settings.value_types import toml_text
from echelon.core.errors import Problem
from echelon.core.rulebook.model import HF_CONFIG_MODEL_TYPE, HF_CONFIG_UNREADABLE
from echelon.core.rules import did_you_mean
from echelon.core.serialize import decode_json

FULL, SLIDING = "full_attention", "sliding_attention"
MISTRAL_WINDOW = QWEN_WINDOW = 4096  # tokens
QWEN_FULL_LAYERS = 28
"""What transformers takes where a config.json has no sliding_window or max_window_layers."""

LATENT_EPS = 1e-6
"""What transformers norms the latent vectors of DeepSeek-V3 with: no key of config.json sets it."""


def read_hf_config(path: Path, set_by: str) -> tuple[dict[str, Entry], list[Problem]]:
    """Return the `model.*` entries of a config.json (or of the folder that holds one)."""
    if is_folder(path):
        path = path / "config.json"
    try:
        data = decode_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        return {}, [missing_file(path, error, set_by)]
    except ValueError as error:
        return {}, [_unreadable(path, f"is not JSON: {error}", set_by)]
    if not isinstance(data, dict):
        return {}, [_unreadable(path, "is not a JSON object", set_by)]
    return config_entries(cast("dict[str, object]", data), path, set_by)


def config_entries(
    config: Mapping[str, object], path: Path, set_by: str
) -> tuple[dict[str, Entry], list[Problem]]:
    """Return the `model.*` entries of what stands in a config.json, `path` in messages."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        close = did_you_mean(str(kind), ARCHITECTURES)
        named = f"model_type = {toml_text(kind)}" if kind else "no model_type"
        problem = HF_CONFIG_MODEL_TYPE.problem(
            f"{path} has {named}; that architecture is not known. If its blocks are those of one "
            f"that is, a run.toml can have {fields_text(config)}",
            key="model.hf_config",
            set_by=set_by,
            suggestions=close or ARCHITECTURES,
        )
        return {}, [problem]
    reader = ConfigJsonReader(path=path, config=config)
    ARCHITECTURES[kind](reader)
    _scores(reader)
    entries, problems = check_layer(reader.entries)
    return dict(entries), reader.problems + problems


def _unreadable(path: Path, why: str, set_by: str) -> Problem:
    return HF_CONFIG_UNREADABLE.problem(f"{path} {why}", key="model.hf_config", set_by=set_by)


def _decoder(reader: ConfigJsonReader, *, theta: float = 10_000.0) -> None:
    reader.need(
        layers="num_hidden_layers",
        hidden="hidden_size",
        heads="num_attention_heads",
        ffn="intermediate_size",
        vocab="vocab_size",
        max_positions="max_position_embeddings",
    )
    reader.take(
        kv_heads=("num_key_value_heads", None),
        norm_eps=("rms_norm_eps", 1e-6),
        initial_std=("initializer_range", 0.02),
        tied=("tie_word_embeddings", False),
    )
    reader.only(hidden_act=("silu", "swish"))
    _rope(reader, theta)


def _rope(reader: ConfigJsonReader, theta: float) -> None:
    key, value = rope_entry(reader.config)
    if value is not None and not isinstance(value, dict):
        reader.refuse(key, value)
        return
    rope = cast("dict[str, object]", value or {})
    reader.set("rope_theta", rope.get("rope_theta", reader.config.get("rope_theta", theta)), key)
    kind = rope_type(rope)
    if kind == LLAMA3_ROPE:
        names = {
            "factor": "factor",
            "low_frequency_factor": "low_freq_factor",
            "high_frequency_factor": "high_freq_factor",
            "original_positions": "original_max_position_embeddings",
        }
        for name, hf_name in names.items():
            if hf_name in rope:
                reader.set(f"rope_scaling.{name}", rope[hf_name], f"{key}.{hf_name}")
            else:
                reader.missing(f"{key}.{hf_name}, which llama3 scaling needs", reader.where(key))
    elif kind == "yarn" and reader.config["model_type"] == "deepseek_v3":
        original = rope.get("original_max_position_embeddings")
        if original is None:
            reader.refuse(key, rope)
        else:
            reader.set("max_positions", original, f"{key}.original_max_position_embeddings")
    elif kind != PLAIN_ROPE:
        reader.refuse(key, rope, {"rope_type": PLAIN_ROPE}, {"rope_type": LLAMA3_ROPE})


def _scores(reader: ConfigJsonReader) -> None:
    """Read which keys a query meets in whatever model, and refuse scores that are capped."""
    reader.take(causal=("is_causal", None))
    if reader.config.get("is_causal") is False and "model.window" in reader.entries:
        # transformers counts one key more on each side of a query then, flash-attention does not.
        reader.refuse("is_causal", False, True)
    reader.only(attn_logit_softcapping=(None,), final_logit_softcapping=(None,))
    listed = reader.config.get("layer_types")
    if listed is None:
        return
    windowed = {"use_sliding_window", "sliding_window"}.intersection(reader.config)
    known = (FULL, SLIDING) if windowed else (FULL,)
    kinds = cast("list[object]", listed) if isinstance(listed, list) else [listed]
    for kind in dict.fromkeys(map(str, kinds)):
        if kind not in known:
            reader.refuse("layer_types", kind, *known)


def _window(reader: ConfigJsonReader, default: int | None) -> None:
    """Set the window of every layer; null is none, and where it is absent `default` holds."""
    window = reader.config.get("sliding_window", default)
    if window is not None:
        reader.set("window", window, "sliding_window")


def _qwen_window(reader: ConfigJsonReader) -> None:
    slides = reader.config.get("use_sliding_window")
    if slides is not None and not isinstance(slides, bool):
        reader.refuse("use_sliding_window", slides, False, True)
    if slides is not True:
        return
    kinds = _layer_kinds(reader)
    # transformers 4 and 5 differ in which layers of this one slide.
    differ = SLIDING in kinds or reader.config["model_type"] == "qwen3_moe"
    window = reader.config.get("sliding_window", QWEN_WINDOW)
    longest = reader.config.get("max_position_embeddings")
    if kinds == {SLIDING}:
        _window(reader, QWEN_WINDOW)
    elif differ and isinstance(window, int) and isinstance(longest, int):
        reader.set("max_positions", min(window, longest), "sliding_window")


def _layer_kinds(reader: ConfigJsonReader) -> set[object]:
    """Return which kinds of layers there are: those listed, else full ones before sliding ones."""
    listed, layers = reader.config.get("layer_types"), reader.config.get("num_hidden_layers")
    if isinstance(listed, list):
        return {str(kind) for kind in cast("list[object]", listed)}
    full = reader.config.get("max_window_layers", QWEN_FULL_LAYERS)
    if not isinstance(full, int) or not isinstance(layers, int) or 0 < full < layers:
        return {FULL, SLIDING}
    return {SLIDING} if full <= 0 else {FULL}


_HEAD_DIM, _TOP_K = ("head_dim", None), "num_experts_per_tok"
_ATTENTION_BIASES = dict.fromkeys(("qkv_bias", "output_bias"), ("attention_bias", False))


def _llama(reader: ConfigJsonReader) -> None:
    _decoder(reader)
    reader.take(head_dim=_HEAD_DIM, **_ATTENTION_BIASES, mlp_bias=("mlp_bias", False))


def _mistral(reader: ConfigJsonReader) -> None:
    _decoder(reader)
    reader.take(head_dim=_HEAD_DIM)
    _window(reader, MISTRAL_WINDOW)


def _qwen2(reader: ConfigJsonReader) -> None:
    _decoder(reader)
    reader.set("qkv_bias", True, "model_type")
    _qwen_window(reader)


def _qwen3(reader: ConfigJsonReader) -> None:
    _decoder(reader)
    reader.set("qk_norm", True, "model_type")
    reader.take(head_dim=("head_dim", 128), **_ATTENTION_BIASES)
    _qwen_window(reader)


def _qwen3_moe(reader: ConfigJsonReader) -> None:
    _qwen3(reader)
    reader.only(decoder_sparse_step=(1,), mlp_only_layers=([], None))
    key = "num_local_experts" if "num_local_experts" in reader.config else "num_experts"
    reader.need("experts.", num_experts=key, top_k=_TOP_K, ffn="moe_intermediate_size")
    reader.take("experts.", renormalise=("norm_topk_prob", False))


def _mixtral(reader: ConfigJsonReader) -> None:
    _decoder(reader, theta=1e6)
    reader.take(head_dim=_HEAD_DIM, norm_eps=("rms_norm_eps", 1e-5))
    count, ffn = "num_local_experts", "intermediate_size"
    reader.need("experts.", num_experts=count, top_k=_TOP_K, ffn=ffn)
    reader.set("experts.renormalise", True, "model_type")
    reader.only(router_jitter_noise=(0.0, 0))
    _window(reader, None)


def _deepseek_v3(reader: ConfigJsonReader) -> None:
    _decoder(reader)
    eps = reader.config.get("rms_norm_eps", LATENT_EPS)
    if eps != LATENT_EPS:
        why = f": its latent vectors are normed with {LATENT_EPS} whatever it says, here all alike"
        reader.refuse("rms_norm_eps", eps, LATENT_EPS, why=why)
    reader.only(
        attention_bias=(False,),
        moe_layer_freq=(1,),
        rope_interleave=(True,),
        scoring_func=("sigmoid",),
        topk_method=("noaux_tc",),
    )
    reader.need(
        "latent.",
        query_rank="q_lora_rank",
        kv_rank="kv_lora_rank",
        nope_dim="qk_nope_head_dim",
        rope_dim="qk_rope_head_dim",
        value_dim="v_head_dim",
    )
    nope, rope = (reader.config.get(k) for k in ("qk_nope_head_dim", "qk_rope_head_dim"))
    if isinstance(nope, int) and isinstance(rope, int):
        reader.set("head_dim", nope + rope, "qk_nope_head_dim + qk_rope_head_dim")
    count, ffn = "n_routed_experts", "moe_intermediate_size"
    reader.need("experts.", num_experts=count, top_k=_TOP_K, ffn=ffn)
    reader.take(
        "experts.",
        shared_experts=("n_shared_experts", 1),
        first_dense_layers=("first_k_dense_replace", 3),
        renormalise=("norm_topk_prob", True),
        gate_scale=("routed_scaling_factor", 2.5),
        groups=("n_group", 8),
        top_groups=("topk_group", 4),
    )
    reader.set("experts.router", "sigmoid", "scoring_func")
    reader.set("experts.router_bias", True, "topk_method")


def _gpt2(reader: ConfigJsonReader) -> None:
    reader.need(
        layers="n_layer",
        hidden="n_embd",
        heads="n_head",
        vocab="vocab_size",
        max_positions="n_positions",
    )
    hidden = reader.config.get("n_embd")
    reader.take(
        ffn=("n_inner", 4 * hidden if isinstance(hidden, int) else None),
        norm_eps=("layer_norm_epsilon", 1e-5),
        initial_std=("initializer_range", 0.02),
        tied=("tie_word_embeddings", True),
    )
    reader.only(
        activation_function=("gelu_new", "gelu_pytorch_tanh"),
        scale_attn_weights=(True,),
        scale_attn_by_inverse_layer_idx=(False,),
        add_cross_attention=(False,),
    )
    values = {"norm": "layernorm", "positions": "learned", "gated": False, "activation": "gelu"}
    for name, value in {**values, "qkv_bias": True, "output_bias": True, "mlp_bias": True}.items():
        reader.set(name, value, "model_type")


ARCHITECTURES: Mapping[str, Callable[[ConfigJsonReader], None]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "gpt2": _gpt2,
    "deepseek_v3": _deepseek_v3,
}
"""How to read each `model_type`."""


NEEDED: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocab": ("vocab_size",),
    "max_positions": ("max_position_embeddings", "n_positions", "max_seq_len"),
}
"""Fields of [model] that a model cannot do without, and the keys that stand for them."""
FURTHER: Mapping[str, tuple[str, ...]] = {
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
}


def fields_text(config: Mapping[str, object]) -> str:
    """Return what a [model] must say: fields that a config.json has, and those that it lacks.

    ``[model] with layers = 32, hidden = 4096, which the file has, and heads, which it lacks``.
    """
    found: list[str] = []
    lacking: list[str] = []
    for field, keys in {**NEEDED, **FURTHER}.items():
        value = next((config[key] for key in keys if _is_count(config.get(key))), None)
        if value is not None:
            found.append(f"{field} = {toml_text(value)}")
        elif field in NEEDED:
            lacking.append(f"{field} ({keys[0]})")
    parts = [f"{', '.join(found)}, which the file has"] if found else []
    parts += [f"{', '.join(lacking)}, which it lacks"] if lacking else []
    return f"[model] with {', and '.join(parts)}"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
