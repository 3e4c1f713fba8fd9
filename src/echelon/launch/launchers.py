# SPDX-License-Identifier: Apache-2.0
"""The rank of this process by MPI, Slurm or Kubernetes, in the names that torchrun uses.

A launcher may start another launcher: Slurm starts mpirun or torchrun, and their processes inherit
its variables. So the innermost launcher counts, and an outer launcher only completes it:

    torchrun < Open MPI, PALS, PMI, PMIx < Slurm < Kubernetes

An inner launcher with rank and world size hides another rank of an outer launcher. With half of the
two it must agree with the outer launcher. Rank 0 of 1 is no launch: its ranks are started here.

Sources: Slurm, srun(1) and sbatch(1), "Output environment variables", and slurm.h for the ids of
steps that are no tasks; Open MPI 5, "Environment variables set for MPI applications"; HPE PALS,
mpiexec(1); MPICH's Hydra for PMI_* and MPI_LOCAL*; Kubernetes, "Indexed Job".
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from echelon.core.errors import Problem
from echelon.core.rulebook.launch import LAUNCHERS_AGREE, RANK_ENVIRONMENT

RANK, WORLD_SIZE = "RANK", "WORLD_SIZE"
LOCAL_RANK, LOCAL_WORLD_SIZE = "LOCAL_RANK", "LOCAL_WORLD_SIZE"
MASTER_ADDR, MASTER_PORT = "MASTER_ADDR", "MASTER_PORT"
LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500  # of TCP
"""The port of torchrun, for launches without an id."""

TORCHRUN, SLURM, KUBERNETES = "torchrun", "Slurm", "Kubernetes"

JOB_INDEX = "JOB_COMPLETION_INDEX"
STEP_ID = "SLURM_STEP_ID"
PROCESS_ID = "SLURM_PROCID"
_NUM_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
_LAUNCH_NODE = "SLURM_LAUNCH_NODE_IPADDR"
_SLURM_IDS = ("SLURM_JOB_ID", STEP_ID)
# Of mpirun in a job of Slurm only some processes are in a step.
_MPI_IDS = ("PMIX_NAMESPACE", "PALS_APID", "PBS_JOBID", "SLURM_JOB_ID")
_SPECIAL_STEPS = 0xFFFFFFF0  # from here on ids of batch scripts, shells of an allocation ...
_FIRST_PORT = 15_000  # of TCP; Linux gives higher ones to outgoing connections
_NUM_PORTS = 10_000  # ports


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiLauncher:
    """A launcher of MPI: its variables by torchrun's names; the first one set counts."""

    name: str
    variables: Mapping[str, tuple[str, ...]]
    start: str
    """A command that starts N ranks."""


MPI_LAUNCHERS = (
    MpiLauncher(
        name="Open MPI",
        variables={
            RANK: ("OMPI_COMM_WORLD_RANK",),
            WORLD_SIZE: ("OMPI_COMM_WORLD_SIZE",),
            LOCAL_RANK: ("OMPI_COMM_WORLD_LOCAL_RANK",),
            LOCAL_WORLD_SIZE: ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        },
        start="mpirun -n {}",
    ),
    MpiLauncher(
        name="PALS",
        variables={
            RANK: ("PALS_RANKID",),
            LOCAL_RANK: ("PALS_LOCAL_RANKID",),
            LOCAL_WORLD_SIZE: ("PALS_LOCAL_SIZE",),
        },
        start="mpiexec -n {}",
    ),
    MpiLauncher(
        name="PMI",
        variables={
            RANK: ("PMI_RANK",),
            WORLD_SIZE: ("PMI_SIZE",),
            LOCAL_RANK: ("PMI_LOCAL_RANK", "MPI_LOCALRANKID"),
            LOCAL_WORLD_SIZE: ("PMI_LOCAL_SIZE", "MPI_LOCALNRANKS"),
        },
        start="mpiexec -n {}",
    ),
    MpiLauncher(name="PMIx", variables={RANK: ("PMIX_RANK",)}, start="mpirun -n {}"),
)
STARTS = {launcher.name: launcher.start for launcher in MPI_LAUNCHERS} | {
    TORCHRUN: "torchrun --nproc-per-node {} -m",
    SLURM: "srun --ntasks {}",
    KUBERNETES: "WORLD_SIZE={}",
}
"""A command that starts N ranks, for each launcher."""

_SET_BY: Mapping[str, Mapping[str, str]] = {
    launcher.name: {name: variables[0] for name, variables in launcher.variables.items()}
    for launcher in MPI_LAUNCHERS
} | {
    SLURM: {
        RANK: PROCESS_ID,
        WORLD_SIZE: "SLURM_NTASKS",
        LOCAL_RANK: "SLURM_LOCALID",
        MASTER_ADDR: "SLURM_JOB_NODELIST",
    },
    KUBERNETES: {RANK: JOB_INDEX},
}
"""The variable of each launcher for a name of torchrun."""
LAUNCHER_VARIABLES: Mapping[str, str] = {
    name: f"read: {name_of_torchrun}, as {launcher.name} sets it"
    for launcher in MPI_LAUNCHERS
    for name_of_torchrun, names in launcher.variables.items()
    for name in names
} | {
    PROCESS_ID: "read: RANK, as Slurm sets it for a task of srun",
    "SLURM_LOCALID": "read: LOCAL_RANK of that task",
    **dict.fromkeys(_NUM_TASKS, "read: WORLD_SIZE of the tasks of srun, the first one set"),
    **dict.fromkeys(_TASKS_PER_NODE, "read: LOCAL_WORLD_SIZE, by the number of the node"),
    "SLURM_NODEID": "read: the number of this node, from 0",
    **dict.fromkeys(_NODE_LISTS, "read: MASTER_ADDR is the first host of the list"),
    _LAUNCH_NODE: "read: MASTER_ADDR, where no list of nodes is set",
    "ENVIRONMENT": "read: BATCH in a script of sbatch, whose process is no task",
    JOB_INDEX: "read: RANK of a pod of an indexed job, where WORLD_SIZE or MASTER_ADDR is set",
    **dict.fromkeys((*_SLURM_IDS, *_MPI_IDS), "read: an id of the launch, for its MASTER_PORT"),
}
"""Every variable of other launchers, and its use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchVariables:
    """The variables of a launch by torchrun's names, and the origin of each value."""

    launcher: str
    values: Mapping[str, str]
    names: Mapping[str, str]
    problems: tuple[Problem, ...] = ()

    def named(self, name: str) -> str:
        """Return the variable that set `name`, or the variable by which the launcher sets it."""
        return self.names.get(name) or _SET_BY.get(self.launcher, {}).get(name, name)


@dataclass(slots=True)
class _Gathered:
    """Values by torchrun's names, with the variable of each."""

    launcher: str
    values: dict[str, str] = field(default_factory=dict[str, str])
    names: dict[str, str] = field(default_factory=dict[str, str])

    def add(self, name: str, variable: str, value: str) -> None:
        if name not in self.values:
            self.values[name], self.names[name] = value, variable

    @property
    def complete(self) -> bool:
        """True if rank and world size are known."""
        return RANK in self.values and WORLD_SIZE in self.values

    @property
    def is_alone(self) -> bool:
        """True for rank 0 of 1, which starts the ranks of its run itself."""
        return self.values.get(RANK) == "0" and self.values.get(WORLD_SIZE) == "1"


def launch_variables(environment: Mapping[str, str]) -> LaunchVariables | None:
    """Return the variables of a launch of this process as a rank; None without a launch."""
    own = _torchrun(environment)
    asked = RANK in environment or WORLD_SIZE in environment
    every = (_mpi(environment), _slurm(environment), _pod(environment))
    outer = [gathered for gathered in every if gathered]
    if not asked and not outer:
        return None
    problems = [] if own.complete else list(_mpi_problems(environment))
    complete = [gathered for gathered in (own, *outer) if gathered.complete]
    own.launcher = next((gathered.launcher for gathered in (*complete, *outer)), TORCHRUN)
    for gathered in outer:
        problems += _merge(own, gathered)
    if not asked and not problems and own.is_alone:
        return None
    if own.launcher != TORCHRUN:
        problems += _add_host(own, environment)
        _add_port(own, environment)
    return LaunchVariables(
        launcher=own.launcher, values=own.values, names=own.names, problems=tuple(problems)
    )


def note_of_local_start(environment: Mapping[str, str]) -> str:
    """Reason that a launcher's variables are no launch, and all ranks start on this host."""
    tasks = next(((name, text) for name in _NUM_TASKS if (text := environment.get(name))), None)
    if environment.get(PROCESS_ID) and tasks is not None and tasks[1] != "1":
        return (
            f"{tasks[0]} = {tasks[1]}, but this process is no task of srun: all ranks start on "
            f"this host. `srun echelon ...` makes each task a rank"
        )
    if environment.get(JOB_INDEX):
        return (
            f"{JOB_INDEX} = {environment[JOB_INDEX]}, but {WORLD_SIZE} and {MASTER_ADDR} are not "
            "set: this pod does all of the work alone. With both set, each pod is a rank"
        )
    return ""


def first_host(node_list: str) -> str:
    """Return the first host of a list of nodes of Slurm; empty where the list is none.

    "node[01-03,07],gpu5" begins with node01, "rack[0-1]n[4,6]" with rack0n4.
    """
    first = re.match(r"(?:[^\[\],\s]|\[[0-9,-]+\])+(?=,|$)", node_list.strip())
    if first is None or not _closed(node_list):
        return ""
    return re.sub(r"\[([0-9]+)[0-9,-]*\]", r"\1", first[0])


def tasks_on_node(counts: str, node: int) -> int | None:
    """Return the tasks of a node by Slurm's short form; "4(x2),3" is 4, 4, 3. None without it."""
    for part in counts.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part.strip())
        if match is None:
            return None
        times = int(match[2] or 1)
        if node < times:
            return int(match[1])
        node -= times
    return None


def _closed(node_list: str) -> bool:
    depth = 0
    for sign in node_list:
        depth += {"[": 1, "]": -1}.get(sign, 0)
        if depth not in (0, 1):
            return False
    return depth == 0


def _torchrun(environment: Mapping[str, str]) -> _Gathered:
    gathered = _Gathered(TORCHRUN)
    for name in (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT):
        if environment.get(name):
            gathered.add(name, name, environment[name])
    return gathered


def _mpi(environment: Mapping[str, str]) -> _Gathered | None:
    """Return the variables of MPI's launchers together; None without a rank."""
    gathered: _Gathered | None = None
    for launcher, variables in _mpi_variables(environment):
        gathered = gathered or _Gathered(launcher.name)
        for name, (variable, value) in variables.items():
            gathered.add(name, variable, value)
    return gathered if gathered is not None and RANK in gathered.values else None


def _mpi_variables(
    environment: Mapping[str, str],
) -> Iterator[tuple[MpiLauncher, dict[str, tuple[str, str]]]]:
    for launcher in MPI_LAUNCHERS:
        variables = {
            name: (variable, environment[variable])
            for name, candidates in launcher.variables.items()
            for variable in reversed(candidates)
            if environment.get(variable)
        }
        if variables:
            yield launcher, variables


def _mpi_problems(environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield contradictions between the launchers of MPI."""
    first: dict[str, tuple[str, str]] = {}
    for _, variables in _mpi_variables(environment):
        for name in (RANK, WORLD_SIZE):
            if (
                name in variables
                and first.setdefault(name, variables[name])[1] != variables[name][1]
            ):
                yield _contradiction(name, first[name], variables[name])


def _slurm(environment: Mapping[str, str]) -> _Gathered | None:
    """Return the variables of a task of srun; None for scripts and shells of an allocation."""
    size = next((name for name in _NUM_TASKS if environment.get(name)), None)
    if not _is_task(environment, size):
        return None
    gathered = _Gathered(SLURM)
    gathered.add(RANK, PROCESS_ID, environment[PROCESS_ID])
    if size is not None:
        gathered.add(WORLD_SIZE, size, environment[size])
    if environment.get("SLURM_LOCALID"):
        gathered.add(LOCAL_RANK, "SLURM_LOCALID", environment["SLURM_LOCALID"])
    counts = next((name for name in _TASKS_PER_NODE if environment.get(name)), None)
    node = environment.get("SLURM_NODEID", "")
    if counts is not None:
        uniform = environment[counts].isdecimal() and counts == _TASKS_PER_NODE[-1]
        tasks = tasks_on_node(environment[counts], int(node) if node.isdecimal() else 0)
        if tasks is not None and (uniform or node.isdecimal()):
            gathered.add(LOCAL_WORLD_SIZE, counts, str(tasks))
    return gathered


def _is_task(environment: Mapping[str, str], size: str | None) -> bool:
    """True if srun has started this process as a task.

    The script of sbatch and the shell of salloc have the variables of the whole allocation, with
    process 0 of as many tasks as it has room for.
    """
    if not environment.get(PROCESS_ID):
        return False
    step = environment.get(STEP_ID, "")
    if step:
        return not (step.isdecimal() and int(step) >= _SPECIAL_STEPS)
    if environment[PROCESS_ID] != "0":
        return True
    return size is not None and environment.get("ENVIRONMENT") != "BATCH"


def _pod(environment: Mapping[str, str]) -> _Gathered | None:
    """Return the variables of an indexed job of Kubernetes; None if its pods work alone.

    The pods of such a job are often whole runs. A pod with the number of pods, or with the host of
    the first, is a rank.
    """
    if not environment.get(JOB_INDEX) or not (
        environment.get(WORLD_SIZE) or environment.get(MASTER_ADDR)
    ):
        return None
    gathered = _Gathered(KUBERNETES)
    gathered.add(RANK, JOB_INDEX, environment[JOB_INDEX])
    gathered.add(LOCAL_RANK, JOB_INDEX, "0")
    gathered.add(LOCAL_WORLD_SIZE, JOB_INDEX, "1")
    return gathered


def _merge(inner: _Gathered, outer: _Gathered) -> list[Problem]:
    """Add the values of an outer launcher to those of inner launchers; return contradictions."""
    differ = [
        name
        for name in (RANK, WORLD_SIZE)
        if name in inner.values
        and name in outer.values
        and inner.values[name].strip() != outer.values[name].strip()
    ]
    if differ and inner.complete:
        return []  # The outer launcher has started the inner one, which has other ranks.
    for name, value in outer.values.items():
        inner.add(name, outer.names[name], value)
    return [
        _contradiction(
            name, (inner.names[name], inner.values[name]), (outer.names[name], outer.values[name])
        )
        for name in differ
    ]


def _contradiction(name: str, inner: tuple[str, str], outer: tuple[str, str]) -> Problem:
    number = {RANK: "the rank of this process", WORLD_SIZE: "the number of ranks"}[name]
    return LAUNCHERS_AGREE.problem(
        f"{number} is {inner[1]} by {inner[0]} and {outer[1]} by {outer[0]}",
        key=name,
        set_by=f"{inner[0]}={inner[1]}, {outer[0]}={outer[1]}",
        suggestions=(f"unset {inner[0]}", f"unset {outer[0]}"),
    )


def _add_host(gathered: _Gathered, environment: Mapping[str, str]) -> list[Problem]:
    """Add the host of rank 0; return the problem of a list of nodes without a host."""
    if MASTER_ADDR in gathered.values:
        return []
    size = gathered.values.get(WORLD_SIZE)
    if size is not None and gathered.values.get(LOCAL_WORLD_SIZE) == size:
        gathered.add(MASTER_ADDR, gathered.names[LOCAL_WORLD_SIZE], LOOPBACK)
        return []
    nodes = next((name for name in _NODE_LISTS if environment.get(name)), None)
    if nodes is None:
        if environment.get(_LAUNCH_NODE):
            gathered.add(MASTER_ADDR, _LAUNCH_NODE, environment[_LAUNCH_NODE])
        return []
    host = first_host(environment[nodes])
    gathered.add(MASTER_ADDR, nodes, host or LOOPBACK)
    if host:
        return []
    wrong = f"{nodes} = {environment[nodes]!r} is no list of hosts"
    instead = f"{MASTER_ADDR}=HOST, the host of rank 0"
    return [RANK_ENVIRONMENT.problem(wrong, key=nodes, suggestions=(instead,))]


def _add_port(gathered: _Gathered, environment: Mapping[str, str]) -> None:
    """Add a port: the same for all ranks of a launch, seldom the same for another launch."""
    names = _SLURM_IDS if gathered.launcher == SLURM else _MPI_IDS
    ids = [name for name in names if environment.get(name)]
    text = ".".join(environment[name] for name in ids)
    port = _FIRST_PORT + zlib.crc32(text.encode()) % _NUM_PORTS if ids else DEFAULT_PORT
    gathered.add(MASTER_PORT, ids[0] if ids else MASTER_PORT, str(port))
