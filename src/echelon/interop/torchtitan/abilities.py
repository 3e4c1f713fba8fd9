"""What torchtitan can run, and its words for our choices. 0.2.2.

distributed/pipeline_parallel.py: its schedules. FSDP 2 over all data and context ranks; tensor
ranks with sequence parallelism.
"""

from __future__ import annotations

from echelon.interop.abilities import ToolAbilities, ToolNames
from echelon.interop.tool_tables import tool_tables
from echelon.schedule.build import SCHEDULES

NAMES, TABLES = ToolNames("torchtitan"), tool_tables("torchtitan")
ONE_STAGE = tuple(name for name in NAMES.schedules if SCHEDULES[name].fits_virtual_stages(1))
"""Schedules with one stage on a rank; torchtitan puts two on it with all others."""


def allows_zero(stage: int, *, dp_replicate: int, dp_shard: int, pp: int, cp: int, tp: int) -> bool:
    """Return whether FSDP 2 shares out as the stage says: everything, as soon as it can."""
    return stage == (0 if dp_shard == cp == 1 else 3)


ABILITIES = ToolAbilities(
    schedules=tuple(NAMES.schedules),
    context_kinds=tuple(NAMES.context_kinds),
    offload=False,
    sequence_parallel=True,
    sequence_parallel_with_experts=True,
    allows_zero=allows_zero,
    settings={"optimizer.decay": "all"},
)
