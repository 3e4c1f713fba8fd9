# SPDX-License-Identifier: Apache-2.0
"""All rules that the controls can break, in the order of their telling."""

from __future__ import annotations

from echelon.page.explorer.controls import Controls, Record
from echelon.page.explorer.inputs import model_shape
from echelon.page.explorer.rules.broken import Broken
from echelon.page.explorer.rules.context import broken_by_context, broken_by_recompute
from echelon.page.explorer.rules.experts import broken_by_experts
from echelon.page.explorer.rules.mesh import (
    broken_by_batch,
    broken_by_devices,
    broken_by_overlap,
    broken_by_servers,
    broken_by_tensor_ranks,
)
from echelon.page.explorer.rules.pipeline import broken_by_pipeline
from echelon.page.explorer.rules.rounding import broken_by_fp8, broken_by_int8
from echelon.page.explorer.rules.zero import broken_by_nodes, broken_by_offload, broken_by_zero


def broken_rules(
    tables: Record, controls: Controls, model: Record, cluster: Record
) -> list[Broken]:
    """Return the rules that a run of the controls breaks; none where it can be planned."""
    shape = model_shape(model["shape"])
    return [
        *broken_by_tensor_ranks(controls, shape),
        *broken_by_batch(tables, controls, shape),
        *broken_by_overlap(controls, cluster),
        *broken_by_servers(controls, shape),
        *broken_by_pipeline(tables, controls, shape),
        *broken_by_zero(controls, shape),
        *broken_by_offload(controls),
        *broken_by_nodes(controls, shape, cluster),
        *broken_by_context(tables, controls, shape),
        *broken_by_recompute(controls, shape),
        *broken_by_fp8(controls, shape, cluster),
        *broken_by_int8(controls, shape),
        *broken_by_experts(controls, shape, cluster),
        *broken_by_devices(controls, cluster),
    ]
