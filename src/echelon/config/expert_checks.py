"""Everything that must hold of experts and of latent attention, in the order of its telling."""

from __future__ import annotations

from echelon.config.expert_balance import BALANCE_FAULTS, IDLE_FAULTS
from echelon.config.expert_mesh import MESH_FAULTS
from echelon.config.expert_travel import TRAVEL_FAULTS
from echelon.config.faults import Find
from echelon.config.model_parts import MODEL_FAULTS

MISFITS: tuple[Find, ...] = (*MODEL_FAULTS, *MESH_FAULTS, *TRAVEL_FAULTS, *BALANCE_FAULTS)
"""What cannot run."""

EXPERT_FAULTS: tuple[Find, ...] = (*MISFITS, *IDLE_FAULTS)
"""What cannot run, and what has no effect."""
