# SPDX-License-Identifier: Apache-2.0
"""The axes of a mesh, outermost (slow links) to innermost (fast links).

*axis* = mesh, *dim* = tensor, *degree* = size of an axis, *group* = ranks that talk to one another.
"""

from enum import StrEnum


class Axis(StrEnum):
    """Name one way in which a run is split over ranks."""

    PP = "pp"
    DP_REPLICATE = "dp_replicate"
    DP_SHARD = "dp_shard"
    CP = "cp"
    TP = "tp"
    EP = "ep"


MESH_AXES = (Axis.PP, Axis.DP_REPLICATE, Axis.DP_SHARD, Axis.CP, Axis.TP)
"""The axes whose degrees multiply to the world size, outermost first. `ep` is folded over them."""

DATA_AXES = (Axis.DP_REPLICATE, Axis.DP_SHARD)
"""The axes along which ranks read different samples."""

LOSS_AXES = (Axis.DP_REPLICATE, Axis.DP_SHARD, Axis.CP)
"""The axes along which ranks see different tokens: loss and gradients are summed over them."""

SHARD_AXES = (Axis.DP_SHARD, Axis.CP)
"""The axes over which ZeRO cuts slices; `dp_replicate` holds copies of them (hybrid sharding)."""
