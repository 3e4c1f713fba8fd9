"""How a stretch of rotary frequencies stands in the config.json of transformers."""

from __future__ import annotations

from echelon.core.model_shape import RopeScaling

Keys = dict[str, object]


def stretch_keys(scaling: RopeScaling) -> Keys:
    """Return the keys of `rope_scaling` (or `rope_parameters`), the base apart."""
    keys: Keys = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.original_positions is not None:
        keys["original_max_position_embeddings"] = scaling.original_positions
    if scaling.kind == "llama3":
        keys["low_freq_factor"] = scaling.low_frequency_factor
        keys["high_freq_factor"] = scaling.high_frequency_factor
    elif scaling.kind == "yarn":
        keys |= {"beta_slow": scaling.slow_turns, "beta_fast": scaling.fast_turns}
        keys["truncate"] = scaling.whole_dims
    elif scaling.kind == "longrope":
        keys["short_factor"] = list(scaling.short_factors)
        keys["long_factor"] = list(scaling.long_factors)
    if scaling.attention_factor is not None:
        keys["attention_factor"] = scaling.attention_factor
    return keys
