# SPDX-License-Identifier: Apache-2.0
"""The store where the ranks of a run meet, and their process group, opened and closed.

This is the only place that calls init_process_group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import (
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
    distributed_c10d,
)
from torch.distributed.distributed_c10d import PrefixStore, Store

from echelon.core.cluster import Backend
from echelon.core.errors import EnvironmentProblem
from echelon.core.rulebook.launch import ENOUGH_DEVICES, PORT_IN_USE, RANK_NEVER_JOINED
from echelon.launch.context import GroupPlace, RankContext, RankProgress
from echelon.launch.environment import LOCAL_HOST, LaunchedRank
from echelon.launch.launchers import TORCHRUN

__all__ = [
    "PrefixStore",
    "Store",
    "device_of",
    "host_store",
    "join_store",
    "joined_ranks",
    "open_launch_store",
    "open_world_size",
    "require_devices",
]


def host_store(port: int, descriptor: int) -> Store:
    """Return a store that this process serves on an already listening socket."""
    return TCPStore(
        LOCAL_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
    )


def join_store(port: int, timeout_s: float, host: str = LOCAL_HOST) -> Store:
    """Return a client of the store at `host`:`port`."""
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def open_launch_store(launched: LaunchedRank, timeout_s: float) -> Store:
    """Return the store of a launched run: the launcher's, or one that rank 0 hosts."""
    where = f"{launched.master_addr}:{launched.master_port}"
    if launched.store_is_hosted or launched.rank > 0:
        try:
            return join_store(launched.master_port, timeout_s, launched.master_addr)
        except RuntimeError as error:
            raise EnvironmentProblem(
                RANK_NEVER_JOINED.problem(
                    f"rank {launched.rank} reached no store at {where} within {timeout_s:g} s"
                )
            ) from error
    try:
        return TCPStore(
            launched.master_addr,
            launched.master_port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
    except RuntimeError as error:
        if "in use" not in str(error).lower():
            raise
        raise EnvironmentProblem(
            PORT_IN_USE.problem(f"port {launched.master_port} is in use", key="MASTER_PORT")
        ) from error


def device_of(backend: Backend, local_rank: int, *, launcher: str = TORCHRUN) -> torch.device:
    """Return the device that the rank drives; EnvironmentProblem if there are too few.

    Slurm (`--gpus-per-task`) and MPI's launchers may show each process its own GPU only.
    """
    if backend == "gloo":
        return torch.device("cpu")
    devices = torch.cuda.device_count()
    if launcher != TORCHRUN and devices == 1:
        local_rank = 0
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
                suggestions=(
                    *([f"a mesh of up to {devices} ranks"] if devices else []),
                    'cluster.preset = "laptop": CPU ranks over gloo',
                    "torchrun, where the GPUs are those of several hosts",
                ),
            )
        )


def target_store(store: Store) -> Store:
    """Return what ranks tell one another about their work, in the store of a job or a launch."""
    return PrefixStore("target", store)


def open_world_size() -> int | None:
    """Return how many ranks the process group has that is open here; None where none is."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else None


@contextmanager
def joined_ranks(  # noqa: PLR0913 - each is one fact of the launch, by its name
    store: Store,
    device: torch.device,
    *,
    rank: int,
    labels: Sequence[str],
    progress: RankProgress,
    timeout_s: float,
    place: GroupPlace | None = None,
) -> Iterator[RankContext]:
    """Hold the process group of all ranks open, and yield what a target knows of its place.

    Or that of `place`, of some of them.

    It is destroyed whatever happens inside; what is raised there ends it without waiting for what
    NCCL has in flight, so an error must be told to others inside. `timeout_s` bounds every
    collective: without it a lost rank costs half an hour.
    """
    place = place or GroupPlace(name="group", rank=rank, world_size=len(labels))
    # Without `device_id`: with it torch makes the communicator of all ranks here, and every later
    # group as a split of it at once (docs of init_process_group), in which all ranks take part,
    # members or not. Ours are opened one by one, in one order, where a wait for others is marked;
    # and the world's would take memory, though groups of the same ranks have one of their own.
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore(place.name, store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        yield RankContext(
            rank=rank,
            world_size=len(labels),
            device=device,
            store=target_store(store),
            progress=progress,
            label=labels[rank],
        )
    except BaseException:
        _close_after_error()
        raise
    dist.destroy_process_group()


def _close_after_error() -> None:
    """Close the process groups of this rank, whose collectives may never end.

    A shutdown of NCCL waits for its kernels, and those for ranks that may wait for this one: so its
    communicators are aborted. Gloo has no abort that does more than its shutdown, which ends when
    the others have closed their ends, or at the timeout of the collective in flight.
    """
    if dist.get_backend() == "nccl":
        distributed_c10d._abort_process_group()  # pyright: ignore[reportPrivateUsage]
    else:
        dist.destroy_process_group()
