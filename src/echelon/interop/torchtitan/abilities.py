# SPDX-License-Identifier: Apache-2.0
"""What torchtitan can run, and its words for our choices. 0.2.2.

distributed/pipeline_parallel.py: its schedules. FSDP 2 over all data and context ranks; tensor
ranks with sequence parallelism. models/llama3/infra/parallelize.py: copies that share nothing out
(DDP) are refused beside any other axis. Compiled blocks have one backward, which schedules cannot
split into that of inputs and that of weights (github.com/pytorch/pytorch/issues/161904).
"""

from __future__ import annotations

from dataclasses import replace

from echelon.interop.abilities import ToolAbilities, ToolNames
from echelon.interop.tool_tables import tool_tables
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
        ABILITIES,
        schedules=tuple(name for name in NAMES.schedules if name not in SPLIT_BACKWARD),
    )
}
"""What generations can run that are compiled."""
