# SPDX-License-Identifier: Apache-2.0
"""The GPUs of this machine, the cluster they are, and variables that ranks on them get.

NVIDIA's driver knows the GPUs without torch. A rank gets a variable unless the user has set it;
each has its reason here.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from echelon.config.cluster.devices import device_preset_from_name
from echelon.config.cluster.settings import named_cluster
from echelon.core.cluster import Backend, Cluster

ALLOCATOR = "PYTORCH_ALLOC_CONF"
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
NCCL_DUMPS = "TORCH_NCCL_DUMP_ON_TIMEOUT"
NCCL_CALLS = "TORCH_FR_BUFFER_SIZE"
NCCL_DUMP_FILE = "TORCH_FR_DUMP_TEMP_FILE"
TF32 = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDefault:
    """State what a rank on a GPU finds in its environment where the user says nothing.

    `other_names` are variables that say the same: a user who has set one of them has said it.
    """

    name: str
    value: str
    why: str
    other_names: tuple[str, ...] = ()


GPU_DEFAULTS = (
    # Source: torch.cuda, "Optimizing memory usage with PYTORCH_ALLOC_CONF". Parameters that are
    # gathered and freed leave gaps of many sizes, which segments of fixed size cannot join.
    GpuDefault(
        name=ALLOCATOR,
        value="expandable_segments:True",
        why="less fragmentation: memory that is freed can be joined",
        other_names=("PYTORCH_CUDA_ALLOC_CONF",),
    ),
    # Source: NVIDIA, "Multi-Process Service", appendix on environment variables: the number of work
    # queues from the host to the device (32 at most, 8 by default: from memory). Every communicator
    # has a stream, and the order of their calls is proven for streams that do not wait for one
    # another, as those of one queue do. What it does to the seconds of a step is not measured.
    GpuDefault(
        name=CONNECTIONS,
        value="32",
        why="streams of different communicators do not wait in one queue",
    ),
    # Source of the next three: torch, "ProcessGroupNCCL Environment Variables"; the values are
    # those that torchtitan sets in its `init_distributed`.
    GpuDefault(
        name=NCCL_ERRORS,
        value="3",
        why="an error of NCCL ends the process without waiting for its communicators",
        other_names=("NCCL_ASYNC_ERROR_HANDLING",),
    ),
    GpuDefault(name=NCCL_DUMPS, value="1", why="what NCCL was doing is written where it times out"),
    GpuDefault(
        name=NCCL_CALLS,
        value="2000",
        why="calls of NCCL that are kept for that",
        other_names=("TORCH_NCCL_TRACE_BUFFER_SIZE",),
    ),
    # Source: torch, "CUDA semantics", TensorFloat-32. Images of containers set it to 1 (from
    # memory); then what is proven for fp32 would not be what is trained.
    GpuDefault(
        name=TF32,
        value="0",
        why="products in fp32 have the bits of fp32, as they are proven",
        other_names=("NVIDIA_TF32_OVERRIDE",),
    ),
)
"""What ranks on GPUs get; what Echelon does not use (Transformer Engine) has no entry."""
_DUMP_FILE_NAMES = (NCCL_DUMP_FILE, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def gpu_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the defaults of ranks on GPUs that the user has set by none of their names."""
    return {
        one.name: one.value
        for one in GPU_DEFAULTS
        if not any(environment.get(name) for name in (one.name, *one.other_names))
    }


def dump_environment(
    folder: Path, backend: Backend, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the variables by which a rank over NCCL writes its dumps into `folder`.

    torch puts the rank behind the name.
    """
    if backend == "gloo" or any(environment.get(name) for name in _DUMP_FILE_NAMES):
        return {}
    return {NCCL_DUMP_FILE: str(folder / "nccl-rank-")}
