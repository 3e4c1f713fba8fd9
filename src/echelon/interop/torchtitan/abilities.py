# SPDX-License-Identifier: Apache-2.0
"""What torchtitan can run, and its words for our choices. 0.2.2.

distributed/pipeline_parallel.py: its schedules. FSDP 2 over all data and context ranks; tensor
ranks with sequence parallelism. models/llama3/infra/parallelize.py: copies that share nothing out
(DDP) are refused beside any other axis. Compiled blocks have one backward, which schedules cannot
split into that of inputs and that of weights (github.com/pytorch/pytorch/issues/161904).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from echelon.interop.abilities import ToolAbilities, ToolNames, tool_tables
from echelon.schedule.build import SCHEDULES

NAMES, TABLES = ToolNames("torchtitan"), tool_tables("torchtitan")
ONE_STAGE = tuple(name for name in NAMES.schedules if SCHEDULES[name].fits_virtual_stages(1))
"""Schedules with one stage on a rank; torchtitan puts two on it with all others."""


MOST_STAGE = 3
"""The stage of ZeRO that is FSDP's."""
SPLIT_BACKWARD = ("zb-v", "dualpipe-v")
"""Schedules with a backward of inputs and one of weights."""


def allows_zero(stage: int, *, dp_replicate: int, dp_shard: int, pp: int, cp: int, tp: int) -> bool:
    """Return whether FSDP 2 shares out as the stage says: everything, as soon as it can."""
    if dp_shard * cp > 1:
        return stage == MOST_STAGE
    return stage == 0 and (dp_replicate == 1 or pp * tp == 1)


ABILITIES = ToolAbilities(
    schedules=tuple(NAMES.schedules),
    context_kinds=tuple(NAMES.context_kinds),
    offload=False,
    sequence_parallel=True,
    sequence_parallel_with_experts=True,
    allows_zero=allows_zero,
    settings={"optimizer.decay": "all"},
)

OF_GENERATION = {
    "fsdp2-compiled": replace(
        ABILITIES, schedules=tuple(name for name in NAMES.schedules if name not in SPLIT_BACKWARD)
    )
}
"""What generations can run that are compiled."""


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
