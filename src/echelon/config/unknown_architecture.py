"""What a config.json of an architecture that is not known says of its model all the same."""

from __future__ import annotations

from collections.abc import Mapping

from echelon.config.kinds import toml_text

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
