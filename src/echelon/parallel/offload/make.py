"""Make the place that a plan names."""

from __future__ import annotations

from pathlib import Path

import torch

from echelon.core.plan import Home
from echelon.parallel.offload.copied import CopiedRest
from echelon.parallel.offload.files import FileRest
from echelon.parallel.offload.host import HostRest
from echelon.parallel.offload.lanes import make_lanes
from echelon.parallel.offload.memory import locked_memory, plain_memory
from echelon.parallel.offload.rest import DeviceRest, Rest


def make_rest(
    home: Home, device: torch.device, *, folder: Path, rank: int, num_buffers: int
) -> Rest:
    """Return an empty place: "none" is the device itself.

    `folder` and `rank` (where the file is, who it is of) matter for "nvme" only, `num_buffers` (how
    many fetched sets are in memory at once) wherever there are buffers. EnvironmentProblem where
    the folder will not do.
    """
    if home == "none":
        return DeviceRest(device)
    on_cpu = device.type == "cpu"
    allocate = plain_memory if on_cpu else locked_memory
    if home == "host":
        side = HostRest(allocate=allocate)
    else:
        side = FileRest(folder, rank, num_buffers, allocate=allocate)
    if on_cpu:
        return side
    return CopiedRest(side, device, make_lanes(device), num_buffers=num_buffers)
