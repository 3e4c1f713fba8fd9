# SPDX-License-Identifier: Apache-2.0
"""The GPUs of this machine by NVIDIA's driver, which needs no torch, and the cluster they are."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from echelon.config.cluster.devices import device_preset_from_name
from echelon.config.cluster.settings import named_cluster
from echelon.core.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverGpus:
    """Hold the GPUs that the driver tells of, each by its name and bytes; none without a driver."""

    driver: str | None = None
    gpus: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCluster:
    """Say which cluster the GPUs of this machine are, or why they are none."""

    name: str | None
    """As COUNTxDEVICE; None where there are no GPUs, or none of the catalogue."""
    unknown: str = ""
    """GPUs that the catalogue does not have, as ``2 x NVIDIA ...``."""


def find_driver_gpus() -> DriverGpus:
    """Return the GPUs that NVIDIA's driver tells of."""
    import pynvml

    driver: str | None = None
    found: list[tuple[str, int]] = []
    try:
        pynvml.nvmlInit()
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            total = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
            found.append((str(pynvml.nvmlDeviceGetName(handle)), total))
    except pynvml.NVMLError:
        pass  # No driver, or no permission to ask it: ranks then run on the CPU.
    return DriverGpus(driver=driver, gpus=tuple(found))


def free_gpu_bytes(
    num_ranks: int, environment: Mapping[str, str] = os.environ
) -> tuple[int | None, ...]:
    """Free bytes of the GPU of each local rank; None if the driver does not know a GPU.

    The driver counts all GPUs of the machine; CUDA_VISIBLE_DEVICES selects and orders the
    GPUs of the ranks.
    """
    import pynvml

    visible = environment.get("CUDA_VISIBLE_DEVICES")
    names = [str(rank) for rank in range(num_ranks)] if visible is None else visible.split(",")
    free: list[int | None] = []
    for name in (*names, *[""] * num_ranks)[:num_ranks]:
        try:
            pynvml.nvmlInit()
            handle = (
                pynvml.nvmlDeviceGetHandleByIndex(int(name))
                if name.strip().isdigit()
                else pynvml.nvmlDeviceGetHandleByUUID(name.strip())
            )
            free.append(int(pynvml.nvmlDeviceGetMemoryInfo(handle).free))
        except pynvml.NVMLError:
            free.append(None)
    return tuple(free)


def own_cluster() -> OwnCluster:
    """Return the cluster that the GPUs of this machine are.

    A machine with several kinds is the one that it has most of; of more than a node is the largest
    number that is one.
    """
    kinds = Counter(find_driver_gpus().gpus)
    for (name, memory), count in kinds.most_common(1):
        preset = device_preset_from_name(name, memory)
        if preset is None:
            return OwnCluster(name=None, unknown=f"{count} x {name}")
        for fewer in range(count, 0, -1):
            if isinstance(named_cluster(f"{fewer}x{preset.name}", ""), Cluster):
                return OwnCluster(name=f"{fewer}x{preset.name}")
    return OwnCluster(name=None)
