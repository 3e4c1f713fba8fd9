# SPDX-License-Identifier: Apache-2.0
"""Rules about the folder that a run writes, and the disk under it."""

from echelon.core.rules import Rule

RUN_WRITTEN_ONCE = Rule(
    id="run-written-once",
    why="""
    A run is never overwritten. A name that was given by hand must be new; a name that was derived
    from the run file gets a number where it is taken. Several processes of one launch make one
    folder together; where a launcher sets none of the variables that are read, each process takes
    itself for the whole run, and all but the first one end here. `echelon doctor`, started as the
    run is, shows what is read.
    """,
    bad="echelon train run.toml --set train.run_name=nano     # runs/nano is there",
    fixed="echelon train run.toml --resume runs/nano     # or another name",
)

RUN_NOT_IN_USE = Rule(
    id="run-not-in-use",
    why="""
    Two processes that write one run would mix their checkpoints. A run is locked while a process
    trains it; the system drops the lock when the process ends, however it ends.
    """,
    bad="echelon train run.toml --resume runs/nano     # twice at once",
    fixed="wait for the first to end, or give the second a name of its own",
)

RUN_NAME = Rule(
    id="run-name",
    why="A run is one folder in the runs folder, so its name is one plain path component.",
    bad="--set train.run_name=../nano",
    fixed="--set train.run_name=nano",
)

RUN_EXISTS = Rule(
    id="run-exists",
    why="""
    A run to resume or to look at is a folder with a plan.json in it. Anything else is refused, with
    a list of the runs that are there.
    """,
    bad="echelon train run.toml --resume runs/nnao",
    fixed="echelon train run.toml --resume runs/nano",
)

FOLDER_WRITABLE = Rule(
    id="folder-writable",
    why="""
    A run writes its plan, its logs and its checkpoints below the runs folder, and nothing else.
    That folder must be one that this user may write and that is not mounted read-only.
    """,
    bad="--set train.runs_dir=/usr/share/runs",
    fixed="--set train.runs_dir=runs",
)

DISK_WORKS = Rule(
    id="disk-works",
    why="""
    The system refused to read or write a file, for a reason other than space or permission. What
    was committed before is still whole: a checkpoint counts only once all of it is on disk.
    """,
    bad="a disk with read errors, or a network file system that went away",
    fixed="--set train.runs_dir=DIR     # DIR is on a disk that works",
)
