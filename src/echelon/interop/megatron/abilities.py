"""What Megatron-LM can run, and its words for our choices. Core 0.16.

pipeline_parallel/schedules.py: 1f1b, and interleaved with a multiple of pp microbatches.
training/arguments.py: recompute; experts over tensor ranks need sequence parallelism.
"""

from __future__ import annotations

from echelon.interop.abilities import ToolAbilities, ToolNames
from echelon.interop.tool_tables import tool_tables
from echelon.schedule.build import SCHEDULES

NAMES, TABLES = ToolNames("megatron"), tool_tables("megatron")
RATE_SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "wsd": "WSD"}
"""What it calls each `optimizer.schedule`."""
NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
POSITIONS = {"learned": "learned_absolute", "rope": "rope"}
SCOPES = {"microbatch": "aux_loss", "sequence": "seq_aux_loss", "global": "global_aux_loss"}
DROPS = {"score": "probs", "position": "position"}
"""What it calls each `model.norm`, `model.positions`, `experts.aux_over`, `experts.drop`."""


def allows_schedule(name: str, *, pp: int, microbatches: int) -> bool:
    """Return whether the microbatches fill the rounds of an interleaved pipeline."""
    return SCHEDULES[name].fits_virtual_stages(1) or microbatches % pp == 0


ABILITIES = ToolAbilities(
    schedules=tuple(NAMES.schedules),
    context_kinds=tuple(NAMES.context_kinds),
    recompute_every=(0, 1),
    sequence_parallel_with_experts=True,
    allows_schedule=allows_schedule,
)
