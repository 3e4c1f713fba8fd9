# SPDX-License-Identifier: Apache-2.0
"""Rules about where slices rest when they are not on the device: host memory, files."""

from echelon.core.rules import Rule

OFFLOAD_FOLDER_EXISTS = Rule(
    id="offload-folder-exists",
    why="""
    Slices that rest in files lie in the folder zero.offload_dir, on each machine its own. It is not
    made: a path that is mistyped or not mounted would quietly be a folder on the system disk.
    """,
    bad='zero.offload_dir = "/mnt/nvme0/offload"     # nothing is mounted there',
    fixed="mkdir -p /mnt/nvme0/offload     # on every machine, once the disk is mounted",
)

OFFLOAD_FOLDER_WRITABLE = Rule(
    id="offload-folder-writable",
    why="""
    Every rank keeps one file in zero.offload_dir, so the user who trains must be able to write
    there. The file has no name: however a rank ends, the system frees its space.
    """,
    bad='zero.offload_dir = "/usr/share"',
    fixed='zero.offload_dir = "/mnt/nvme0/offload"     # a folder that this user may write',
)

OFFLOAD_SPACE = Rule(
    id="offload-space",
    why="""
    The space of all slices is reserved before the first step, so that a disk (or a quota, or a
    limit on the size of files) that is too small is found before a run has work to lose. Some
    file systems cannot reserve; there, the first write that finds no room ends the run, which
    then goes on from its last checkpoint.
    """,
    bad="12 bytes per parameter and slice on a disk that has less than that free",
    fixed="zero.offload_dir on a larger disk, or more ranks in mesh.dp_shard",
)

OFFLOAD_FILE_WORKS = Rule(
    id="offload-file-works",
    why="""
    What rests in a file is read and written all the time. When the system refuses (a disk that
    fails, a device that is pulled, a network file system that goes away, a file cut short from
    outside), slices are lost and the run ends. The last checkpoint is the source of truth: offload
    files never outlive a run.
    """,
    bad="a disk with read errors under zero.offload_dir",
    fixed="--resume RUN --set zero.offload_dir=DIR     # DIR is on a disk that works",
)

OFFLOAD_HOST_MEMORY = Rule(
    id="offload-host-memory",
    why="""
    Slices that rest in the memory of the host are allocated before the first step; with a GPU
    they are also locked there, so that it can copy them while it computes. A limit on the memory
    of a process, or on what it may lock, can refuse that.
    """,
    bad='zero.optimizer_offload = "host"     # and less free memory than all slices need',
    fixed='zero.optimizer_offload = "nvme"     # or a higher limit, or more ranks in mesh.dp_shard',
)
