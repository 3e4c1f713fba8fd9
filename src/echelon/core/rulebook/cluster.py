# SPDX-License-Identifier: Apache-2.0
"""Rules about clusters: tiers of links, units of a bandwidth, what calibration measures."""

from echelon.core.rules import Rule

LINK_BANDWIDTH_IN_BITS = Rule(
    id="link-bandwidth-in-bits",
    why="""
    A bandwidth is bytes per second of one device in one direction. Networks are sold in bits (400
    Gb/s = 50 GB/s), links between devices by the sum of both directions (900 GB/s = 450 GB/s each
    way), and nodes by the sum of their interfaces: taken as they are printed, they make a plan look
    2 to 64 times faster. A bandwidth well above what the link of this name carries is questioned,
    and so is a network above the fastest interface there is; `sure = true` says that it is meant,
    `interfaces` that the devices of a node share so many ways into the network.
    """,
    example="""
    [[links]]
    name = "InfiniBand NDR 400 Gb/s"
    degree = "all"
    %s
    latency_s = 8e-6
    """,
    bad="bandwidth = 400e9",
    fixed="bandwidth = 50e9",
)

CLUSTER_UNITS = Rule(
    id="cluster-units",
    why="""
    Numbers of a cluster are bytes, bytes per second, dense FLOP per second and seconds. Devices are
    sold in GB, GB/s or TB/s and TFLOP/s, often those of sparse matrices, latencies are told in
    microseconds. A number that no device can have, or that is far from what the catalogue has of
    a device or link of this name, is questioned; `sure = true` in [device], or in the [[links]],
    says that it is meant.
    """,
    example="""
    [[links]]
    name = "InfiniBand NDR 400 Gb/s"
    degree = "all"
    bandwidth = 50e9
    %s
    """,
    bad="latency_s = 8",
    fixed="latency_s = 8e-6",
)

MEASURED_OR_EFFICIENCY = Rule(
    id="measured-or-efficiency",
    why="""
    Where kernels of a device were measured (`measured` in [device]), their rates predict our
    trainer, and [device.efficiency] predicts other trainers alone. A file that was printed from a
    preset has both, and is right. An efficiency that was changed is meant for our trainer too,
    which it would not reach: say that nothing was measured, and it does.
    """,
    example="""
    [device]
    %s
    [device.efficiency]
    matmul = 0.6
    """,
    bad='measured = "hopper"',
    fixed='measured = "none"',
)

TIERS_DIVIDE_CLUSTER = Rule(
    id="tiers-divide-cluster",
    why="""
    Each tier of links joins groups of equal size, groups inside of groups: devices of a node, nodes
    of a rack, racks of the cluster. So the degree of a tier divides that of the next one, and the
    last is the number of devices. A tier either divides a node or holds whole nodes.
    """,
    example="""
    [[links]]
    link = "nvlink-4"
    %s
    [[links]]
    link = "infiniband-ndr"
    degree = "all"
    """,
    bad="degree = 3",
    fixed="degree = 4",
)

INTERFACES_BETWEEN_NODES = Rule(
    id="interfaces-between-nodes",
    why="""
    `interfaces` is how many ways into a network the devices of a node share: 4 of them and 8
    devices are half an interface for each where all send at once. Links that stay inside of a node
    have none.
    """,
    bad="""
    [[links]]
    link = "nvlink-4"
    degree = 4
    interfaces = 4
    [[links]]
    link = "infiniband-ndr"
    degree = "all"
    """,
    fixed="""
    [[links]]
    link = "nvlink-4"
    degree = 4
    [[links]]
    link = "infiniband-ndr"
    degree = "all"
    interfaces = 4
    """,
)

RANKS_TO_CALIBRATE = Rule(
    id="ranks-to-calibrate",
    why="""
    `echelon calibrate` measures with as many ranks as a run will have on a machine, all at work at
    once: on GPUs one rank on each, so no more than there are; on CPU cores up to 64, which then
    share the cores. Under torchrun its ranks are measured, as many on each node.
    """,
    bad="echelon calibrate --ranks 0",
    fixed="echelon calibrate --ranks 4",
)

CALIBRATION_SAME_DEVICE = Rule(
    id="calibration-same-device",
    why="""
    A cluster file describes one kind of device. Ranks on other devices, or calibrations of other
    devices, of another backend or of another dtype, would give it constants of none of them. Each
    kind has a file of its own.
    """,
    bad="echelon calibrate merge a100.toml h100.toml --out cluster.toml",
    fixed="echelon calibrate merge h100.toml h100-network.toml --out cluster.toml",
)

CALIBRATION_SAME_NODE = Rule(
    id="calibration-same-node",
    why="""
    Links were measured with all ranks of a node sending at once, so they are those of nodes of this
    size: calibrations that are merged have as many devices on a node. One of a single device has no
    links, and goes with all others.
    """,
    bad="echelon calibrate merge node-of-4.toml node-of-8.toml --out cluster.toml",
    fixed="echelon calibrate merge one-device.toml node-of-8.toml --out cluster.toml",
)

CALIBRATIONS_TO_MERGE = Rule(
    id="calibrations-to-merge",
    why="""
    `echelon calibrate merge` joins two or more files that `echelon calibrate` wrote, each named
    once: what they say of the same constant becomes its median. A file that was written by hand,
    or printed from a preset, measured nothing and would outvote what was measured.
    """,
    bad="echelon calibrate merge node.toml node.toml --out cluster.toml",
    fixed="echelon calibrate merge node-1.toml node-2.toml --out cluster.toml",
)

CALIBRATION_CONTINUED = Rule(
    id="calibration-continued",
    why="""
    A calibration writes each measurement at once, into OUT.unfinished beside the file that it is to
    write, and the same command after an interruption goes on from there. Times of two machines, of
    two versions of torch or of other numbers of ranks are not those of one machine: measurements
    that were begun so are not gone on with, and none are made, until another --out is named or
    the unfinished ones are removed. Nor do two calibrations write the same file at once.
    """,
    bad="echelon calibrate --ranks 4 --out node.toml     # node.toml.unfinished is of 2 ranks",
    fixed="echelon calibrate --ranks 4 --out node-of-4.toml",
)
