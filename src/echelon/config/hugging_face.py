"""A Hugging Face config.json -> settings of the model, for architectures that are computed exactly.

What is read is the shape. Dropout probabilities tell how a checkpoint was trained and are not read:
`model.dropout` says how yours is. A sliding window of every layer is `model.window`. Where only
some layers slide (Qwen's `max_window_layers`), it shortens `max_positions` to the window, up to
which windowed and full attention are the same. DeepSeek-V3's YaRN is an extension after
pretraining: its shape is read as pretrained, up to the original positions. Released weights went
through that extension, and are refused (weights-positions).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from echelon.config.config_json import LLAMA3_ROPE, PLAIN_ROPE, Reader, rope_kind, rope_of
from echelon.config.entries import Entry, check_layer
from echelon.config.files import is_folder, missing_file
from echelon.config.kinds import toml_text
from echelon.config.unknown_architecture import fields_text
from echelon.core.errors import Problem
from echelon.core.rulebook.model import (
    HF_CONFIG_MISSING_KEY,
    HF_CONFIG_MODEL_TYPE,
    HF_CONFIG_UNREADABLE,
)
from echelon.core.rules import did_you_mean

FULL, SLIDING = "full_attention", "sliding_attention"
MISTRAL_WINDOW = QWEN_WINDOW = 4096
QWEN_FULL_LAYERS = 28
"""What transformers takes where a config.json has no sliding_window or max_window_layers."""

LATENT_EPS = 1e-6
"""What transformers norms the latent vectors of DeepSeek-V3 with: no key of config.json sets it."""


def read_hf_config(path: Path, set_by: str) -> tuple[dict[str, Entry], list[Problem]]:
    """Return the `model.*` entries of a config.json (or of the folder that holds one)."""
    if is_folder(path):
        path = path / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        return {}, [missing_file(path, error, set_by)]
    except (ValueError, RecursionError) as error:
        return {}, [_unreadable(path, f"is not JSON: {error}", set_by)]
    if not isinstance(data, dict):
        return {}, [_unreadable(path, "is not a JSON object", set_by)]
    config = cast("dict[str, object]", data)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        close = did_you_mean(str(kind), ARCHITECTURES)
        named = f"model_type = {toml_text(kind)}" if kind else "no model_type"
        problem = HF_CONFIG_MODEL_TYPE.problem(
            f"{path} has {named}; that architecture is not known. If its blocks are those of one "
            f"that is, a run.toml can have {fields_text(config)}",
            key="model.hf_config",
            set_by=set_by,
            works=close or ARCHITECTURES,
        )
        return {}, [problem]
    reader = Reader(path=path, config=config)
    ARCHITECTURES[kind](reader)
    _scores(reader)
    entries, problems = check_layer(reader.entries)
    return dict(entries), reader.problems + problems


def _unreadable(path: Path, why: str, set_by: str) -> Problem:
    return HF_CONFIG_UNREADABLE.problem(f"{path} {why}", key="model.hf_config", set_by=set_by)


def _decoder(reader: Reader, *, theta: float = 10_000.0) -> None:
    reader.need("layers", "num_hidden_layers")
    reader.need("hidden", "hidden_size")
    reader.need("heads", "num_attention_heads")
    reader.need("ffn", "intermediate_size")
    reader.need("vocab", "vocab_size")
    reader.need("max_positions", "max_position_embeddings")
    reader.take("kv_heads", "num_key_value_heads")
    reader.take("norm_eps", "rms_norm_eps", 1e-6)
    reader.take("initial_std", "initializer_range", 0.02)
    reader.take("tied", "tie_word_embeddings", False)
    reader.only("hidden_act", "silu", "swish")
    _rope(reader, theta)


def _rope(reader: Reader, theta: float) -> None:
    key, value = rope_of(reader.config)
    if value is not None and not isinstance(value, dict):
        reader.refuse(key, value)
        return
    rope = cast("dict[str, object]", value or {})
    reader.set("rope_theta", rope.get("rope_theta", reader.config.get("rope_theta", theta)), key)
    kind = rope_kind(rope)
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
                reader.problems.append(
                    HF_CONFIG_MISSING_KEY.problem(
                        f"{reader.path} has no {key}.{hf_name}, which llama3 scaling needs",
                        key="model.hf_config",
                        set_by=reader.where(key),
                    )
                )
    elif kind == "yarn" and reader.config["model_type"] == "deepseek_v3":
        original = rope.get("original_max_position_embeddings")
        if original is None:
            reader.refuse(key, rope)
        else:
            reader.set("max_positions", original, f"{key}.original_max_position_embeddings")
    elif kind != PLAIN_ROPE:
        reader.refuse(key, rope, {"rope_type": PLAIN_ROPE}, {"rope_type": LLAMA3_ROPE})


def _scores(reader: Reader) -> None:
    """Read which keys a query meets in whatever model, and refuse scores that are capped."""
    reader.take("causal", "is_causal")
    if reader.config.get("is_causal") is False and "model.window" in reader.entries:
        # transformers counts one key more on each side of a query then, flash-attention does not.
        reader.refuse("is_causal", False, True)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        reader.only(key, None)
    listed = reader.config.get("layer_types")
    if listed is None:
        return
    windowed = {"use_sliding_window", "sliding_window"}.intersection(reader.config)
    known = (FULL, SLIDING) if windowed else (FULL,)
    kinds = cast("list[object]", listed) if isinstance(listed, list) else [listed]
    for kind in dict.fromkeys(map(str, kinds)):
        if kind not in known:
            reader.refuse("layer_types", kind, *known)


def _window(reader: Reader, default: int | None) -> None:
    """Set the window of every layer; null is none, and where it is absent `default` holds."""
    window = reader.config.get("sliding_window", default)
    if window is not None:
        reader.set("window", window, "sliding_window")


def _qwen_window(reader: Reader) -> None:
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


def _layer_kinds(reader: Reader) -> set[object]:
    """Return which kinds of layers there are: those listed, else full ones before sliding ones."""
    listed, layers = reader.config.get("layer_types"), reader.config.get("num_hidden_layers")
    if isinstance(listed, list):
        return {str(kind) for kind in cast("list[object]", listed)}
    full = reader.config.get("max_window_layers", QWEN_FULL_LAYERS)
    if not isinstance(full, int) or not isinstance(layers, int) or 0 < full < layers:
        return {FULL, SLIDING}
    return {SLIDING} if full <= 0 else {FULL}


def _llama(reader: Reader) -> None:
    _decoder(reader)
    reader.take("head_dim", "head_dim")
    reader.take("qkv_bias", "attention_bias", False)
    reader.take("output_bias", "attention_bias", False)
    reader.take("mlp_bias", "mlp_bias", False)


def _mistral(reader: Reader) -> None:
    _decoder(reader)
    reader.take("head_dim", "head_dim")
    _window(reader, MISTRAL_WINDOW)


def _qwen2(reader: Reader) -> None:
    _decoder(reader)
    reader.set("qkv_bias", True, "model_type")
    _qwen_window(reader)


def _qwen3(reader: Reader) -> None:
    _decoder(reader)
    reader.take("head_dim", "head_dim", 128)
    reader.set("qk_norm", True, "model_type")
    reader.take("qkv_bias", "attention_bias", False)
    reader.take("output_bias", "attention_bias", False)
    _qwen_window(reader)


def _qwen3_moe(reader: Reader) -> None:
    _qwen3(reader)
    reader.only("decoder_sparse_step", 1)
    reader.only("mlp_only_layers", [], None)
    key = "num_local_experts" if "num_local_experts" in reader.config else "num_experts"
    reader.need("experts.num_experts", key)
    reader.need("experts.top_k", "num_experts_per_tok")
    reader.need("experts.ffn", "moe_intermediate_size")
    reader.take("experts.renormalise", "norm_topk_prob", False)


def _mixtral(reader: Reader) -> None:
    _decoder(reader, theta=1e6)
    reader.take("head_dim", "head_dim")
    reader.take("norm_eps", "rms_norm_eps", 1e-5)
    reader.need("experts.num_experts", "num_local_experts")
    reader.need("experts.top_k", "num_experts_per_tok")
    reader.need("experts.ffn", "intermediate_size")
    reader.set("experts.renormalise", True, "model_type")
    reader.only("router_jitter_noise", 0.0, 0)
    _window(reader, None)


def _deepseek_v3(reader: Reader) -> None:
    _decoder(reader)
    eps = reader.config.get("rms_norm_eps", LATENT_EPS)
    if eps != LATENT_EPS:
        why = f": its latent vectors are normed with {LATENT_EPS} whatever it says, here all alike"
        reader.refuse("rms_norm_eps", eps, LATENT_EPS, why=why)
    reader.only("attention_bias", False)
    reader.only("moe_layer_freq", 1)
    reader.only("rope_interleave", True)
    reader.only("scoring_func", "sigmoid")
    reader.only("topk_method", "noaux_tc")
    reader.need("latent.query_rank", "q_lora_rank")
    reader.need("latent.kv_rank", "kv_lora_rank")
    reader.need("latent.nope_dim", "qk_nope_head_dim")
    reader.need("latent.rope_dim", "qk_rope_head_dim")
    reader.need("latent.value_dim", "v_head_dim")
    nope, rope = (reader.config.get(k) for k in ("qk_nope_head_dim", "qk_rope_head_dim"))
    if isinstance(nope, int) and isinstance(rope, int):
        reader.set("head_dim", nope + rope, "qk_nope_head_dim + qk_rope_head_dim")
    reader.need("experts.num_experts", "n_routed_experts")
    reader.need("experts.top_k", "num_experts_per_tok")
    reader.need("experts.ffn", "moe_intermediate_size")
    reader.take("experts.shared_experts", "n_shared_experts", 1)
    reader.take("experts.first_dense_layers", "first_k_dense_replace", 3)
    reader.take("experts.renormalise", "norm_topk_prob", True)
    reader.take("experts.gate_scale", "routed_scaling_factor", 2.5)
    reader.take("experts.groups", "n_group", 8)
    reader.take("experts.top_groups", "topk_group", 4)
    reader.set("experts.router", "sigmoid", "scoring_func")
    reader.set("experts.router_bias", True, "topk_method")


def _gpt2(reader: Reader) -> None:
    reader.need("layers", "n_layer")
    reader.need("hidden", "n_embd")
    reader.need("heads", "n_head")
    reader.need("vocab", "vocab_size")
    reader.need("max_positions", "n_positions")
    hidden = reader.config.get("n_embd")
    reader.take("ffn", "n_inner", 4 * hidden if isinstance(hidden, int) else None)
    reader.take("norm_eps", "layer_norm_epsilon", 1e-5)
    reader.take("initial_std", "initializer_range", 0.02)
    reader.take("tied", "tie_word_embeddings", True)
    reader.only("activation_function", "gelu_new", "gelu_pytorch_tanh")
    reader.only("scale_attn_weights", True)
    reader.only("scale_attn_by_inverse_layer_idx", False)
    reader.only("add_cross_attention", False)
    values = {"norm": "layernorm", "positions": "learned", "gated": False, "activation": "gelu"}
    for name in ("qkv_bias", "output_bias", "mlp_bias"):
        values[name] = True
    for name, value in values.items():
        reader.set(name, value, "model_type")


ARCHITECTURES: Mapping[str, Callable[[Reader], None]] = {
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
