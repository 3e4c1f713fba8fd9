# SPDX-License-Identifier: Apache-2.0
"""All rules between settings, in the order of their telling: the list that everything asks.

A run is checked by all of them (`config/load.py`), a Plan by those without which ranks could
not run it (`config/rules/plan.py`), and a suggestion is kept where they find nothing new.
"""

from __future__ import annotations

from echelon.config.rules.blocks import (
    BLOCK_FINDERS,
    KERNEL_FINDERS,
    LORA_FINDERS,
    LORA_RUN_FINDERS,
    fused_pieces,
)
from echelon.config.rules.context import CONTEXT_EFFECT_FINDERS, CONTEXT_FINDERS
from echelon.config.rules.experts import (
    BALANCE_EFFECT_FINDERS,
    BALANCE_FINDERS,
    DISPATCH_FINDERS,
    EXPERT_MESH_FINDERS,
    expert_settings_of_dense_model,
)
from echelon.config.rules.islands import (
    LOCAL_SGD_FINDERS,
    LOCAL_SGD_PLAN_FINDERS,
    LOST_ISLAND_FINDERS,
    LOST_ISLAND_PLAN_FINDERS,
)
from echelon.config.rules.mesh import (
    COLLECTIVE_FINDERS,
    COLLECTIVE_PLAN_FINDERS,
    MESH_FINDERS,
    TENSOR_FINDERS,
    mesh_fits_cluster,
    mesh_settings_without_effect,
)
from echelon.config.rules.model import MODEL_FINDERS, PART_FINDERS, experts_enough, gate_is_built
from echelon.config.rules.pipeline import (
    PIPELINE_FINDERS,
    STAGE_FINDERS,
    pipeline_settings_without_effect,
)
from echelon.config.rules.precision import FP8_FINDERS, FP8_RUN_FINDERS, PRECISION_FINDERS
from echelon.config.rules.servers import SERVER_FINDERS, SERVER_PLAN_FINDERS
from echelon.config.rules.training import (
    MIXTURE_FINDERS,
    OPTIMIZER_FINDERS,
    RECOMPUTE_FINDERS,
    RUN_FINDERS,
    recomputed_operators,
)
from echelon.config.rules.violations import ViolationFinder
from echelon.config.rules.zero import INT8_FINDERS, ZERO_FINDERS, int8_block_without_effect

EXPERT_FINDERS = (*PART_FINDERS, *EXPERT_MESH_FINDERS, *DISPATCH_FINDERS, *BALANCE_FINDERS)

FINDERS: tuple[ViolationFinder, ...] = (
    *MODEL_FINDERS,
    *BLOCK_FINDERS,
    *MESH_FINDERS,
    *SERVER_FINDERS,
    *PIPELINE_FINDERS,
    *STAGE_FINDERS,
    mesh_settings_without_effect,
    *ZERO_FINDERS,
    *CONTEXT_FINDERS,
    *CONTEXT_EFFECT_FINDERS,
    pipeline_settings_without_effect,
    *RECOMPUTE_FINDERS,
    *KERNEL_FINDERS,
    *COLLECTIVE_FINDERS,
    *LOCAL_SGD_FINDERS,
    *LOST_ISLAND_FINDERS,
    *OPTIMIZER_FINDERS,
    *PRECISION_FINDERS,
    *FP8_FINDERS,
    *FP8_RUN_FINDERS,
    *INT8_FINDERS,
    int8_block_without_effect,
    *LORA_FINDERS,
    *LORA_RUN_FINDERS,
    *RUN_FINDERS,
    *MIXTURE_FINDERS,
    *EXPERT_FINDERS,
    *BALANCE_EFFECT_FINDERS,
    mesh_fits_cluster,
)
"""Every rule between the settings of a run."""

PLAN_FINDERS: tuple[ViolationFinder, ...] = (
    gate_is_built,
    *BLOCK_FINDERS,
    experts_enough,
    recomputed_operators,
    fused_pieces,
    *COLLECTIVE_PLAN_FINDERS,
    *LOCAL_SGD_PLAN_FINDERS,
    *LOST_ISLAND_PLAN_FINDERS,
    *SERVER_PLAN_FINDERS,
    *TENSOR_FINDERS,
    *EXPERT_FINDERS,
    expert_settings_of_dense_model,
    *CONTEXT_FINDERS,
    *FP8_FINDERS,
    *INT8_FINDERS,
    *LORA_FINDERS,
)
"""Rules without which ranks could not run a plan; `schedule/plan_problems.py` has its schedule."""
