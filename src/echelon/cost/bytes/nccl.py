# SPDX-License-Identifier: Apache-2.0
"""Memory that NCCL takes on a device for our trainer: outside of any allocator of torch.

None of it is measured on our trainer. The sizes are those of NCCL's code and of what others saw:

    a connection   A pair of ranks that send each other has, on each of its channels, 10 MiB to
                   receive (buffers of three protocols: 4 MiB `NCCL_BUFFSIZE`, 4.7 and 0.5, in pages
                   of 2 MiB) and 2 x 2 MiB beside. On 8 H100 an all-to-all took 4.34 - 1.06 GB:
                   7 peers x 32 channels x 14 MiB = 3.29 GB (NVIDIA/nccl, issue 1685).
    collectives    A ring has two neighbours whatever its size (issue 986): one to receive from and
                   one to send to, so one connection on each channel.
    messages       One connection to each peer of the node. Peers on other nodes share a pool:
                   512 MiB (issue 2363).
    channels       32, as NCCL had at most and has on NVSwitch; memory is linear in them, and slower
                   links have fewer (issue 986): 4 without NVLink (from memory).

Groups of the same ranks share a communicator, but those between stages of a pipeline.
`NCCL_MAX_NCHANNELS` and `NCCL_MAX_P2P_NCHANNELS` make it less.
"""

from __future__ import annotations

import numpy as np

from echelon.core.cluster import Cluster
from echelon.cost.inputs.cost_inputs import CostInputs
from echelon.cost.inputs.numbers import Num

CONNECTION_BYTES = 14 * 2**20
"""Bytes of a pair of ranks on one channel, on each of them."""
POOL_BYTES = 2**29
"""Bytes of a communicator from which messages to other nodes are sent."""
CUDA_CONTEXT_BYTES = 0.5e9
"""Bytes of a process before its first tensor: 484 MiB (NVIDIA/nccl, pull request 2366)."""
CHANNELS = 32
"""Channels of a communicator over NVLink."""
SLOW_CHANNELS = 4
"""The same over slower links."""
NVLINK_BANDWIDTH = 1e11
"""Bytes/s from which a link is NVLink: PCIe 5 has 64e9, the first NVLink of a server 150e9."""


def joins_by_nvlink(cluster: Cluster) -> bool:
    """Return whether the fastest links of a cluster are NVLink."""
    return max((link.bandwidth for link in cluster.links), default=0.0) >= NVLINK_BANDWIDTH


def nccl_facts(cluster: Cluster) -> dict[str, float]:
    """Return the facts of our trainer about the memory of a process and of NCCL on a cluster."""
    fast = joins_by_nvlink(cluster)
    return {
        "context_bytes": CUDA_CONTEXT_BYTES,
        "connection_bytes": float(CONNECTION_BYTES * (CHANNELS if fast else SLOW_CHANNELS)),
        "pool_bytes": float(POOL_BYTES),
    }


def nccl_bytes(work: CostInputs) -> Num:
    """Return what the communicators of a rank take that has most of them."""
    collective = num_collective_communicators(work) * work.software.connection_bytes
    near, pools = message_peers(work)
    return collective + near * work.software.connection_bytes + pools * work.software.pool_bytes


def num_collective_communicators(work: CostInputs) -> Num:
    """Return how many communicators of a rank run collectives: one for each set of ranks."""
    layout = work.layout
    data, stage = layout.dp * layout.cp, layout.devices / layout.pp
    sliced, experts = _is(layout.zero, 0.0), _is(work.model.experts, 0.0)
    ring = layout.cp / layout.ulysses
    own_data = stage / (layout.ep * layout.expert_tp)
    return (
        _several(layout.devices)
        + _several(data) * _smaller(data, layout.devices)
        + sliced * _several(layout.shard) * _smaller(layout.shard, data)
        + sliced * _several(layout.dp_replicate) * _smaller(layout.dp_replicate, data)
        + _several(layout.tp) * _smaller(layout.tp, layout.devices)
        + _several(ring) * _smaller(ring, layout.shard)
        + _several(layout.ulysses) * _smaller(layout.ulysses, layout.shard)
        + experts * _several(stage) * _smaller(stage, layout.devices) * _smaller(data, stage)
        + experts * _several(layout.ep) * (1.0 + _several(own_data))
        + _several(layout.pp) * work.model.tied
    )


def message_peers(work: CostInputs) -> tuple[Num, Num]:
    """Return to how many peers on its node a rank has links, and how many pools for others.

    Stages are outermost in a mesh and tensor ranks innermost; experts are folded over the ranks
    between, and over tensor ranks where they are not cut.
    """
    layout = work.layout
    stride = layout.devices / layout.pp
    ring = np.where(np.asarray(layout.gathered) > 0.0, 1.0, layout.cp / layout.ulysses)
    inner = np.where(np.asarray(layout.expert_tp) > 1.0, layout.tp, 1.0)
    links = (
        # Activations and gradients have a communicator each; neighbours are two, of two ranks one.
        (2.0, np.minimum(2.0, layout.pp - 1.0), _on_node(work, layout.pp, stride)),
        (1.0, np.minimum(2.0, ring - 1.0), _on_node(work, ring, layout.tp * layout.ulysses)),
        (1.0, layout.ulysses - 1.0, _on_node(work, layout.ulysses, layout.tp)),
        (1.0, layout.ep - 1.0, _on_node(work, layout.ep, inner)),
    )
    near: Num = 0.0
    pools: Num = 0.0
    for count, peers, here in links:
        close = np.asarray(np.minimum(peers, here - 1.0), dtype=np.float64)
        near = near + count * close
        pools = pools + count * np.where(peers > close, 1.0, 0.0)
    return near, pools


def _on_node(work: CostInputs, members: Num, stride: Num) -> Num:
    """Return how many of so many ranks, so far apart, are on one node."""
    on_node = np.asarray(work.machine.node // stride, dtype=np.float64)
    return np.minimum(np.maximum(on_node, 1.0), members)


def _several(degree: Num) -> Num:
    return _is(degree, 1.0)


def _is(value: Num, more_than: float) -> Num:
    return np.where(np.asarray(value) > more_than, 1.0, 0.0)


def _smaller(group: Num, other: Num) -> Num:
    """Return 1 where a group is not the other one, whose communicator it would share."""
    return np.where(np.asarray(group) < np.asarray(other), 1.0, 0.0)
