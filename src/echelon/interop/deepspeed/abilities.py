# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed can run, and its words for our choices. 0.19.

docs/pipeline: 1f1b, with ZeRO 0 and 1. AutoTP: ZeRO 0 to 2. ALST: Ulysses.
"""

from __future__ import annotations

from collections.abc import Mapping

from echelon.interop.abilities import ToolAbilities, ToolNames, by_word, tool_tables

NAMES, TABLES = ToolNames("deepspeed"), tool_tables("deepspeed")
EXCHANGE = by_word(NAMES.context_kinds)["ulysses"]
"""How sequences are cut: heads are exchanged."""
RATE_SCHEDULES = {"constant": "WarmupLR", "linear": "WarmupDecayLR", "cosine": "WarmupCosineLR"}
"""What it calls each `optimizer.schedule`."""
OFFLOAD_DEVICES = {"none": "none", "host": "cpu", "nvme": "nvme"}
"""Where slices rest between uses: here, and there."""


def allows_zero(stage: int, *, dp_replicate: int, dp_shard: int, pp: int, cp: int, tp: int) -> bool:
    """Return whether a stage goes with pipeline and tensor ranks; only stage 3 has replicas."""
    highest = 1 if pp > 1 else 2 if tp > 1 else 3
    return stage <= highest and (dp_replicate == 1 or stage in (0, 3))


ABILITIES = ToolAbilities(
    schedules=tuple(NAMES.schedules),
    virtual_stages=(1,),
    context_kinds=tuple(NAMES.context_kinds),
    sequence_parallel=False,
    sequence_parallel_with_experts=False,
    allows_zero=allows_zero,
)

OF_GENERATION: Mapping[str, ToolAbilities] = {}
"""What generations can run that is not what it can run today: no difference is known."""
