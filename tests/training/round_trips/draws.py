"""Random tiny configurations of each family of transformers that is read.

What a family can have is drawn: heads and key heads, widths, tied heads, biases, windows, kinds of
rotary positions and what part of a head turns, norms, caps, experts. Some have what is refused by
name here, so that a walk tells which rules refuse what.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from tests.config.model.architectures.families import CONFIGURATIONS

Settings = dict[str, Any]
Draw = Callable[[Random], Settings]

LONGEST = 32  # positions that a model has
ORIGINAL = 8  # positions before they were stretched
REFUSED_SHARE = 0.04
"""Of the configurations, those that get a setting which is refused by name."""

NO_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
"""Else tokens that these vocabularies do not have; a row of padding is not trained there."""

FULL, SLIDING = "full_attention", "sliding_attention"
_HEADS = ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (6, 2), (6, 3), (8, 2), (8, 4))
_EXACT, _TANH = "gelu", "gelu_pytorch_tanh"


def some(random: Random, share: float = 0.5) -> bool:
    """Return true in a share of the draws."""
    return random.random() < share


def _sizes(random: Random, *, free: bool = True, dims: tuple[int, ...] = (4, 6, 8)) -> Settings:
    """Return counts and widths; heads are as wide as the stream has it where they aren't free."""
    heads, kv_heads = random.choice(_HEADS)
    head_dim = random.choice(dims)
    found: Settings = {
        "vocab_size": random.choice((257, 258, 261, 288)),
        "hidden_size": heads * head_dim,
        "intermediate_size": random.choice((20, 24, 36, 40, 33)),
        "num_hidden_layers": random.choice((2, 2, 3, 4)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": LONGEST,
        "initializer_range": random.choice((0.02, 0.1)),
        "tie_word_embeddings": some(random),
    }
    if free:
        found |= {"head_dim": head_dim, "hidden_size": heads * random.choice((4, 6))}
    return found


def _eps(random: Random, key: str = "rms_norm_eps") -> Settings:
    return {key: random.choice((1e-5, 1e-6))} if some(random) else {}


def _rope(
    random: Random, *kinds: str, rotary_dims: int = 0, name: str = "rope_parameters"
) -> Settings:
    """Return how positions turn, by one of the kinds, or as the family has it."""
    if some(random, 0.25):
        return {}
    kind = random.choice(kinds)
    rope: Settings = {"rope_type": kind, "rope_theta": random.choice((50.0, 1e4, 1e6))}
    if kind != "default":
        rope["factor"] = random.choice((2.0, 4.0))
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": random.choice((2.0, 4.0))}
    if kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = ORIGINAL
    if kind == "yarn":
        rope["factor"] = LONGEST / ORIGINAL
        for key, values in {
            "beta_fast": (4.0, 16.0),
            "beta_slow": (1.0, 2.0),
            "attention_factor": (0.7, 1.3),
            "truncate": (False,),
        }.items():
            if some(random, 0.3):
                rope[key] = random.choice(values)
    if kind == "longrope":
        for key in ("short_factor", "long_factor"):
            rope[key] = [round(random.uniform(1.0, 4.0), 3) for _ in range(rotary_dims // 2)]
        del rope["factor"]
    return {name: rope}


_KINDS = ("default", "default", "linear", "dynamic", "yarn")


def _biases(random: Random, *keys: str) -> Settings:
    return {key: some(random) for key in keys if some(random, 0.7)}


def _window(random: Random) -> Settings:
    return {"sliding_window": random.choice((None, 3, 5, 12))}


def _layer_types(random: Random, layers: int) -> list[str]:
    """Return kinds of blocks: by turns, one sort before the other, or all alike."""
    if some(random):
        return [random.choice(((SLIDING, FULL), (FULL, SLIDING)))[n % 2] for n in range(layers)]
    first = random.randint(0, layers)
    return [FULL] * first + [SLIDING] * (layers - first)


def _llama(random: Random) -> Settings:
    sizes = _sizes(random)
    rope = _rope(random, *_KINDS, "llama3")
    return {**sizes, **_eps(random), **rope, **_biases(random, "attention_bias", "mlp_bias")}


def _mistral(random: Random) -> Settings:
    return {**_sizes(random), **_eps(random), **_rope(random, *_KINDS), **_window(random)}


def _qwen_window(random: Random, layers: int) -> Settings:
    if some(random):
        return {}
    window = {"use_sliding_window": True, "sliding_window": random.choice((3, 5, 12))}
    if some(random):
        return {**window, "max_window_layers": random.randint(0, layers)}
    return {**window, "layer_types": _layer_types(random, layers)}


def _qwen2(random: Random) -> Settings:
    sizes = _sizes(random, free=False)
    window = _qwen_window(random, sizes["num_hidden_layers"])
    return {**sizes, **_eps(random), **_rope(random, *_KINDS), **window}


def _qwen3(random: Random) -> Settings:
    sizes = _sizes(random)
    window = _qwen_window(random, sizes["num_hidden_layers"])
    rope = _rope(random, *_KINDS)
    return {**sizes, **_eps(random), **rope, **window, **_biases(random, "attention_bias")}


def _qwen3_moe(random: Random) -> Settings:
    experts = random.choice((4, 6, 8))
    sizes = {**_sizes(random), **_eps(random), **_rope(random, *_KINDS)}
    return {
        **sizes,
        **_biases(random, "attention_bias"),
        "moe_intermediate_size": random.choice((12, 16, 20)),
        "norm_topk_prob": some(random),
        "num_experts": experts,
        "num_experts_per_tok": random.randint(1, min(3, experts)),
    }


def _mixtral(random: Random) -> Settings:
    experts = random.choice((2, 4, 8))
    sizes = {**_sizes(random), **_eps(random), **_rope(random, *_KINDS), **_window(random)}
    top_k = random.randint(1, min(3, experts))
    return {**sizes, "num_local_experts": experts, "num_experts_per_tok": top_k}


def _deepseek_v3(random: Random) -> Settings:
    sizes, rope_dim = _sizes(random, free=False), random.choice((4, 8))
    groups, of_group = random.choice(((1, 4), (2, 2), (2, 4), (4, 2)))
    top_groups = random.randint(1, groups)
    rope = _rope(random, "default", "default", "yarn")
    if rope.get("rope_parameters", {}).get("rope_type") == "yarn" and some(random):
        table = rope["rope_parameters"]
        table.pop("attention_factor", None)
        table |= {"mscale": 1.0, "mscale_all_dim": random.choice((0.7, 1.0))}
    return {
        **sizes,
        **rope,
        "num_key_value_heads": sizes["num_attention_heads"],
        "head_dim": rope_dim,
        "q_lora_rank": random.choice((12, 16)),
        "kv_lora_rank": random.choice((8, 12)),
        "qk_nope_head_dim": random.choice((4, 6, 8)),
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": random.choice((4, 6, 8)),
        "moe_intermediate_size": random.choice((12, 16)),
        "n_routed_experts": groups * of_group,
        "n_shared_experts": random.choice((1, 2)),
        "num_experts_per_tok": random.randint(1, top_groups * of_group),
        "n_group": groups,
        "topk_group": top_groups,
        "first_k_dense_replace": random.choice((0, 1)),
        "norm_topk_prob": some(random),
        "routed_scaling_factor": random.choice((1.0, 2.5)),
    }


def _gemma(random: Random) -> Settings:
    sizes = {**_sizes(random), **_eps(random), **_rope(random, *_KINDS)}
    act = {"hidden_act": random.choice((_TANH, _EXACT))} if some(random) else {}
    return {**sizes, **act, **_biases(random, "attention_bias")}


def _granite(random: Random) -> Settings:
    sizes = {**_sizes(random, free=False), **_eps(random), **_rope(random, *_KINDS)}
    multipliers = {
        "embedding_multiplier": (1.0, 6.0, 12.0),
        "residual_multiplier": (0.22, 1.0),
        "attention_multiplier": (0.1, 0.3),
        "logits_scaling": (1.0, 3.0, 8.0),
    }
    drawn = {key: random.choice(values) for key, values in multipliers.items()}
    return {**sizes, **drawn, **_biases(random, "attention_bias", "mlp_bias")}


def _olmo2(random: Random) -> Settings:
    sizes = {**_sizes(random, free=False), **_eps(random), **_rope(random, *_KINDS)}
    return {**sizes, **_biases(random, "attention_bias")}


def _smollm3(random: Random) -> Settings:
    sizes = {**_sizes(random, free=False), **_eps(random), **_rope(random, *_KINDS)}
    layers, every = sizes["num_hidden_layers"], random.choice((1, 2, 3, 4))
    turns = {"no_rope_layer_interval": every}
    if some(random):
        turns = {"no_rope_layers": [int((n + 1) % every != 0) for n in range(layers)]}
    return {**sizes, **turns, **_biases(random, "attention_bias", "mlp_bias")}


def _gpt2(random: Random) -> Settings:
    sizes = _sizes(random, free=False)
    return {
        "vocab_size": sizes["vocab_size"],
        "n_positions": LONGEST,
        "n_embd": sizes["hidden_size"],
        "n_layer": sizes["num_hidden_layers"],
        "n_head": sizes["num_attention_heads"],
        "n_inner": random.choice((None, 40)),
        "tie_word_embeddings": sizes["tie_word_embeddings"],
        "initializer_range": sizes["initializer_range"],
        **_eps(random, "layer_norm_epsilon"),
    }


def _starcoder2(random: Random) -> Settings:
    sizes = {**_sizes(random, free=False), **_eps(random, "norm_epsilon")}
    act = {"hidden_act": random.choice((_TANH, _EXACT))} if some(random) else {}
    window = {**_rope(random, *_KINDS), **_window(random)}
    return {**sizes, **act, **window, **_biases(random, "use_bias")}


def _gpt_neox(random: Random) -> Settings:
    sizes = {**_sizes(random, free=False, dims=(8, 16)), **_eps(random, "layer_norm_eps")}
    del sizes["num_key_value_heads"]
    act = {"hidden_act": random.choice((_TANH, _EXACT))} if some(random) else {}
    part = {"rotary_pct": random.choice((0.25, 0.5, 1.0))} if some(random, 0.7) else {}
    return {**sizes, **act, **part, **_biases(random, "attention_bias", "use_parallel_residual")}


def _falcon(random: Random) -> Settings:
    sizes = {**_sizes(random, free=False), **_eps(random, "layer_norm_epsilon")}
    kv_heads = sizes.pop("num_key_value_heads")
    sizes["ffn_hidden_size"] = sizes.pop("intermediate_size")
    found: Settings = {**sizes, **_rope(random, "default", "linear"), **_biases(random, "bias")}
    if some(random):
        norms = {"num_ln_in_parallel_attn": random.choice((1, 2))} if some(random) else {}
        return {**found, **norms, "new_decoder_architecture": True, "num_kv_heads": kv_heads}
    return {**found, "multi_query": some(random), "parallel_attn": some(random)}


def _phi3(random: Random) -> Settings:
    sizes = {**_sizes(random, free=False, dims=(8, 16)), **_eps(random), **_window(random)}
    width = sizes["hidden_size"] // sizes["num_attention_heads"]
    part = random.choice((0.5, 0.75, 1.0))
    turned = int(part * width)
    rope = _rope(random, "default", "longrope", "longrope", rotary_dims=turned)
    return {
        **sizes,
        **rope,
        "partial_rotary_factor": part,
        "original_max_position_embeddings": random.choice((ORIGINAL, 2 * ORIGINAL)),
    }


def _glm(random: Random) -> Settings:
    sizes = {**_sizes(random, dims=(8, 12)), **_eps(random)}
    part = {"partial_rotary_factor": random.choice((0.5, 1.0))} if some(random) else {}
    return {**sizes, **part, **_biases(random, "attention_bias")}


def _two_kinds(random: Random) -> Settings:
    """Return what Gemma 2 and 3 have in common."""
    sizes = {**_sizes(random), **_eps(random)}
    kinds = {}
    if some(random):
        kinds["layer_types"] = _layer_types(random, sizes["num_hidden_layers"])
    scalar = random.choice((4, 7, 24))
    window = {"sliding_window": random.choice((3, 5, 12)), "query_pre_attn_scalar": scalar}
    return {**sizes, **kinds, **window, **_biases(random, "attention_bias")}


def _caps(random: Random) -> Settings:
    caps = {"attn_logit_softcapping": (None, 0.5, 20.0), "final_logit_softcapping": (None, 3.0)}
    return {key: random.choice(values) for key, values in caps.items() if some(random)}


def _gemma2(random: Random) -> Settings:
    return {**_two_kinds(random), **_caps(random), **_rope(random, *_KINDS)}


def _gemma3(random: Random) -> Settings:
    caps = {"final_logit_softcapping": random.choice((None, 3.0))}
    found = {**_two_kinds(random), **caps}
    if some(random):
        far: Settings = {"rope_type": "default", "rope_theta": random.choice((1e3, 1e6))}
        if some(random):
            far |= {"rope_type": "linear", "factor": 8.0}
        near = {"rope_type": "default", "rope_theta": random.choice((50.0, 1e4))}
        found["rope_parameters"] = {FULL: far, SLIDING: near}
    return found


DRAWS: Mapping[str, Draw] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "granite": _granite,
    "olmo2": _olmo2,
    "smollm3": _smollm3,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3,
    "gpt2": _gpt2,
    "starcoder2": _starcoder2,
    "gpt_neox": _gpt_neox,
    "falcon": _falcon,
    "phi3": _phi3,
    "glm": _glm,
    "glm4": _glm,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
}
"""What draws the settings of a model_type."""

REFUSED: Mapping[str, Settings] = {
    "llama": {"hidden_act": "relu"},
    "smollm3": {"use_sliding_window": True, "sliding_window": 4},
    "qwen3_moe": {"decoder_sparse_step": 2},
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
    "falcon": {"alibi": True},
    "mistral": {"hidden_act": "gelu_10"},
    "gemma3_text": {"attn_logit_softcapping": 20.0},
}
"""Settings that are refused by name, of some model_types."""


def draw_configuration(random: Random, kind: str) -> Settings:
    """Return settings of a model_type.

    One without a draw of its own takes one of the configurations that are compared in float64.
    """
    if kind not in DRAWS:
        listed = [settings for name, settings in CONFIGURATIONS.values() if name == kind]
        sizes = {"vocab_size": 261, "max_position_embeddings": LONGEST}
        return {**random.choice(listed), **sizes, **NO_TOKENS}
    found = {**DRAWS[kind](random), **NO_TOKENS}
    return {**found, **REFUSED[kind]} if kind in REFUSED and some(random, REFUSED_SHARE) else found
