"""Open and close the process group of a job: the only place that calls init_process_group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from echelon.core.cluster import Backend
from echelon.core.errors import EnvironmentProblem
from echelon.core.rulebook.launch import ENOUGH_DEVICES
from echelon.launch.store import Store


def device_of(backend: Backend, local_rank: int) -> torch.device:
    """Return the device that the rank drives; EnvironmentProblem where there are too few."""
    if backend == "gloo":
        return torch.device("cpu")
    devices = torch.cuda.device_count()
    if local_rank >= devices:
        raise EnvironmentProblem(
            ENOUGH_DEVICES.problem(
                f"local rank {local_rank} needs GPU {local_rank}, but torch sees {devices}"
            )
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def require_devices(backend: Backend, num_ranks: int, *, set_by: str = "") -> None:
    """Raise EnvironmentProblem where this host lacks GPUs for so many ranks: before any starts."""
    if backend == "gloo":
        return
    devices = torch.cuda.device_count()
    if num_ranks > devices:
        raise EnvironmentProblem(
            ENOUGH_DEVICES.problem(
                f"nccl gives each rank a GPU of its own: the mesh asks for {num_ranks}, and torch "
                f"sees {devices} here",
                key="cluster.preset",
                set_by=set_by,
                works=(
                    *([f"a mesh of up to {devices} ranks"] if devices else []),
                    'cluster.preset = "laptop": CPU ranks over gloo',
                    "torchrun, where the GPUs are those of several hosts",
                ),
            )
        )


@contextmanager
def process_group(
    backend: Backend, store: Store, *, rank: int, world_size: int, timeout_s: float
) -> Iterator[None]:
    """Hold the default process group open; it is destroyed whatever happens inside.

    `timeout_s` bounds every collective: without it a lost rank costs half an hour.
    """
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
