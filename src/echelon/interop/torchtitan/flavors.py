# SPDX-License-Identifier: Apache-2.0
"""The models that flavors of torchtitan are. Version 0.2.2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Flavor:
    """Say which preset a flavor of torchtitan is, what it has otherwise, and up to which length."""

    preset: str
    name: str = ""
    changes: Mapping[str, object] = field(default_factory=dict[str, object])
    longest: int | None = None


_LLAMA_3_1 = {
    "model.max_positions": 131072,
    "model.rope_scaling.factor": 8.0,
    "model.rope_scaling.low_frequency_factor": 1.0,
    "model.rope_scaling.high_frequency_factor": 4.0,
    "model.rope_scaling.original_positions": 8192,
}
BIASED = {"model.experts.router_bias": True, "experts.balance": "bias", "experts.bias_rate": 0.001}
DEEPSEEK = {"model.norm_eps": 1e-5, "batch.documents": "separate", **BIASED}

FLAVORS: Mapping[tuple[str, str], Flavor] = {
    ("deepseek_v3", "671B"): Flavor(
        preset="deepseek-v3", name="deepseek-v3-671b", changes=DEEPSEEK, longest=4096
    ),
    ("llama3", "8B"): Flavor(preset="llama3-8b", name="llama3.1-8b", changes=_LLAMA_3_1),
    ("llama3", "70B"): Flavor(preset="llama3-70b", name="llama3.1-70b", changes=_LLAMA_3_1),
    ("llama3", "405B"): Flavor(preset="llama3.1-405b"),
    **{
        ("qwen3", size): Flavor(preset=f"qwen3-{size.lower()}")
        for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")
    },
    **{
        ("qwen3", size): Flavor(
            preset=f"qwen3-{size.lower()}", name=f"qwen3-{size.lower()}-biased", changes=BIASED
        )
        for size in ("30B-A3B", "235B-A22B")
    },
}
"""What each model and flavor is: those of Llama 3 are Llama 3.1's, and routers have a bias."""
