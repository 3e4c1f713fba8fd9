# SPDX-License-Identifier: Apache-2.0
"""Where slices rest between uses: on the device, in the memory of the host, or in files.

Split: nothing; ZeRO has cut the slices, this says where they lie (ZeRO-Offload, ZeRO-Infinity).
Sent:  nothing between ranks; between device, host and disk whatever is fetched and put.
Bytes: `cost/bytes/held.py` counts what rests; buffers are bounded by `zero.offload_buffers`.
Must divide: nothing.
Source: Ren et al., "ZeRO-Offload", 2021; Rajbhandari et al., "ZeRO-Infinity", 2021.

    store          what every place does; slices in memory, of the device or the host
    file_store     slices in a file, moved by threads
    copying_store  slices on the host side of a GPU, copied there and back
    host_memory    whole pages in a bounded number of buffers, and copies next to the computation
"""

from __future__ import annotations

import torch

from echelon.parallel.offload.copying_store import CopiedFetch, CopyingOffloadStore
from echelon.parallel.offload.file_store import FileFetch, FileOffloadStore
from echelon.parallel.offload.host_memory import (
    device_memory,
    locked_memory,
    make_copy_streams,
    plain_memory,
)
from echelon.parallel.offload.store import ImmediateFetch, MemoryOffloadStore, OffloadPlace

__all__ = ["OffloadPlace", "OffloadStore", "PendingFetch", "make_offload_store"]

OffloadStore = MemoryOffloadStore | FileOffloadStore | CopyingOffloadStore
"""A place where named flat tensors rest between uses."""

PendingFetch = ImmediateFetch | FileFetch | CopiedFetch
"""A set of tensors on its way to where the caller computes."""


def make_offload_store(place: OffloadPlace, device: torch.device) -> OffloadStore:
    """An empty store; EnvironmentProblem where the folder will not do."""
    if place.target == "none":
        return MemoryOffloadStore("device", device_memory(device))
    on_cpu = device.type == "cpu"
    allocate = plain_memory if on_cpu else locked_memory
    if place.target == "host":
        side = MemoryOffloadStore("host", allocate)
    else:
        side = FileOffloadStore(
            place.folder,
            place.rank,
            place.num_buffers,
            chunk_bytes=place.chunk_bytes,
            allocate=allocate,
        )
    if on_cpu:
        return side
    return CopyingOffloadStore(
        side, device, make_copy_streams(device), num_buffers=place.num_buffers
    )
