# SPDX-License-Identifier: Apache-2.0
"""What Megatron-LM can run, and its words for our choices. Core 0.16.

pipeline_parallel/schedules.py: 1f1b, and interleaved with a multiple of pp microbatches.
training/arguments.py: recompute; experts over tensor ranks need sequence parallelism.

Older ones, by the same file of their releases: gradients and parameters are shared out since 0.12
(--use-custom-fsdp, May 2025), and stages have equal numbers of blocks until 0.13
(--pipeline-model-parallel-layout).
"""

from __future__ import annotations

from dataclasses import replace

from echelon.interop.abilities import ToolAbilities, ToolNames, tool_tables
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


def allows_equal_stages(*, layers: int, stages: int) -> bool:
    """Return whether stages have as many blocks each, or with embedding and head as one each.

    --account-for-embedding-in-pipeline-split counts them so.
    """
    return layers % stages == 0 or (layers + 2) % stages == 0


_BEFORE_2025 = replace(ABILITIES, zero_stages=(0, 1), allows_stages=allows_equal_stages)
OF_GENERATION = {"megatron": _BEFORE_2025, "megatron-core": _BEFORE_2025}
"""What generations before 2025 can run."""
