# SPDX-License-Identifier: Apache-2.0
"""What Accelerate can run, and its words for our choices. 1.15.

FSDP 2 (ZeRO 3) with tensor and context ranks, neither pipelines nor expert ranks. What DDP and
DeepSpeed's plugin add up in other dtypes is left aside.
"""

from __future__ import annotations

from collections.abc import Mapping

from echelon.interop.abilities import ToolAbilities, ToolNames, tool_tables

NAMES, TABLES = ToolNames("accelerate"), tool_tables("accelerate")

ABILITIES = ToolAbilities(
    degrees={"pp": (1,), "ep": (1,), "expert_tp": (1,)},
    context_kinds=tuple(NAMES.context_kinds),
    recompute_every=(0, 1),
    zero_stages=(3,),
    offload=False,
    sequence_parallel=False,
    sequence_parallel_with_experts=False,
    reduces_in_parameter_dtype=True,
)

OF_GENERATION: Mapping[str, ToolAbilities] = {}
"""What generations can run that is not what it can run today: no difference is known."""
