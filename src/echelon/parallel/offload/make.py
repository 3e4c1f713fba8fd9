"""Make the place that a plan names."""

from __future__ import annotations

from pathlib import Path

import torch

from echelon.core.plan import Home
from echelon.parallel.offload.files import FileRest
from echelon.parallel.offload.rest import DeviceRest, MemoryRest, Rest


def make_rest(
    home: Home, device: torch.device, *, folder: Path, rank: int, num_buffers: int
) -> Rest:
    """Return an empty place: "none" is the device itself.

    `folder`, `rank` and `num_buffers` matter for "nvme" only: where the file is, who it is of, and
    how many fetched sets are in memory at once. EnvironmentProblem where the folder will not do.
    """
    if home == "none":
        return DeviceRest(device)
    if home == "nvme":
        return FileRest(folder, rank, num_buffers)
    return MemoryRest(torch.device("cpu"), "host")
