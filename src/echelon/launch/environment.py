# SPDX-License-Identifier: Apache-2.0
"""The one table of environment variables that launching reads and writes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from echelon.core.choices.trackers import TRACKER_VARIABLES
from echelon.core.cluster import Backend
from echelon.core.errors import EnvironmentProblem, Problem
from echelon.core.rulebook.launch import (
    LAUNCHED_WORLD_SIZE,
    RANK_ENVIRONMENT,
    TF_CONFIG_AGREES,
    TF_CONFIG_SERVERS,
)
from echelon.launch.gpus import (
    ALLOCATOR,
    CONNECTIONS,
    NCCL_CALLS,
    NCCL_DUMP_FILE,
    NCCL_DUMPS,
    NCCL_ERRORS,
    TF32,
    gpu_environment,
)
from echelon.launch.host import interface_problem, num_usable_cores
from echelon.launch.launchers import (
    LAUNCHER_VARIABLES,
    LOCAL_RANK,
    LOCAL_WORLD_SIZE,
    LOOPBACK,
    MASTER_ADDR,
    MASTER_PORT,
    RANK,
    STARTS,
    TORCHRUN,
    WORLD_SIZE,
    LaunchVariables,
    launch_variables,
    note_of_local_start,
)
from echelon.launch.tf_config import EVALUATOR, TF_CONFIG, TFCluster, read_tf_config, require_rank

LOCAL_HOST = LOOPBACK
"""Where local ranks meet."""
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
RUN_ID = "TORCHELASTIC_RUN_ID"
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
OMP_THREADS = "OMP_NUM_THREADS"
OPENBLAS_THREADS = "OPENBLAS_NUM_THREADS"
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
ACCELERATE_FSDP = "ACCELERATE_USE_FSDP"
ACCELERATE_FSDP_STRATEGY = "FSDP_SHARDING_STRATEGY"
ACCELERATE_DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"
ACCELERATE_ZERO_STAGE = "ACCELERATE_DEEPSPEED_ZERO_STAGE"
COMPILER = "CXX"

VARIABLES: Mapping[str, str] = {
    RANK: "read: which rank this process is, set by torchrun; written for local ranks",
    LOCAL_RANK: "read: which device of its host; written for local ranks",
    LOCAL_WORLD_SIZE: "read: how many ranks this node has, where nodes are measured",
    WORLD_SIZE: "read: how many ranks there are; written for local ranks",
    MASTER_ADDR: "read: the host of the first rank; written for local ranks",
    MASTER_PORT: "read: the port where ranks meet, also for local ranks; written for them",
    TF_CONFIG: "read: the cluster and this process's task, as TensorFlow's launchers write them",
    RESTART_COUNT: "read: which attempt of torchrun this is; keeps attempts apart",
    RUN_ID: "read: the run of torchrun; keeps runs apart",
    AGENT_STORE: "read: whether torchrun itself hosts the store at MASTER_ADDR:MASTER_PORT",
    GLOO_INTERFACE: "written for local ranks unless set: lo, so that no traffic leaves the host",
    OMP_THREADS: "written for local ranks unless set: usable cores / ranks, at least 1",
    OPENBLAS_THREADS: "written for the process that forks ranks unless set: 1, so it may fork",
    NVML_CHECK: "written for it unless set: 1, so that no import starts the CUDA driver there",
    ALLOCATOR: "written for ranks on GPUs unless set: memory that grows in place",
    CONNECTIONS: "written for them unless set: as many queues of a GPU as there may be",
    NCCL_ERRORS: "written for them unless set: an error of NCCL ends the process",
    NCCL_DUMPS: "written for them unless set: the last calls of NCCL are dumped at a timeout",
    NCCL_CALLS: "written for them unless set: how many calls that is",
    NCCL_DUMP_FILE: "written for them unless set: into the logs of the run",
    TF32: "written for them unless set: products in fp32 stay in fp32",
    ACCELERATE_FSDP: "read: whether Accelerate was asked for FSDP, in the proof of a program of it",
    ACCELERATE_FSDP_STRATEGY: "read: the sharding that it was asked for",
    ACCELERATE_DEEPSPEED: "read: whether Accelerate was asked for DeepSpeed",
    ACCELERATE_ZERO_STAGE: "read: the ZeRO stage that it was asked for",
    COMPILER: "read: the C++ compiler of PyTorch's compiler, where kernels are compiled on a CPU",
    **LAUNCHER_VARIABLES,
    **TRACKER_VARIABLES,
}
"""Every variable, and what for."""


LAUNCH_VARIABLES = (
    *(RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TF_CONFIG),
    *(RUN_ID, RESTART_COUNT, AGENT_STORE),
    *LAUNCHER_VARIABLES,
)
"""The variables by which a process knows its rank."""
_RANK_VARIABLES = (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)
_LARGEST_PORT = 65535  # of TCP


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedRank:
    """The rank and the launch of this process, by the variables of its launcher."""

    rank: int
    """From 0 to `world_size` - 1."""
    local_rank: int
    """The rank among the ranks of this host, which is the GPU of the rank."""
    world_size: int
    """Ranks of the launch."""
    master_addr: str
    """The host of rank 0, which has the store."""
    master_port: int
    """Its TCP port."""
    attempt: str = "0"
    """The run and the restart of torchrun, which keep the stores of attempts apart."""
    store_is_hosted: bool = False
    """True if the launcher hosts the store at that port."""
    servers: int | None = None
    """How many of the ranks, the last ones, are parameter servers; None where nobody said."""
    launcher: str = TORCHRUN
    """The program that started the ranks, by whose variables they are known."""


def zero_stage_asked_of_accelerate(environment: Mapping[str, str] = os.environ) -> tuple[int, str]:
    """Return the ZeRO stage that Accelerate was asked for, and by what; 0 for none.

    `accelerate launch` and an FSDP plugin say so in the environment, whatever the Accelerator does
    then. A hybrid strategy replicates over hosts: it asks for nothing that one host could break.
    """
    if environment.get(ACCELERATE_FSDP, "").lower() == "true":
        strategy = environment.get(ACCELERATE_FSDP_STRATEGY, "FULL_SHARD").upper()
        if strategy in ("1", "2", "FULL_SHARD", "SHARD_GRAD_OP"):
            return 3, f"FSDP ({ACCELERATE_FSDP})"
    if environment.get(ACCELERATE_DEEPSPEED, "").lower() == "true":
        stage = environment.get(ACCELERATE_ZERO_STAGE, "")
        if stage in ("1", "2", "3"):
            return int(stage), f"ZeRO {stage} ({ACCELERATE_DEEPSPEED})"
    return 0, ""


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher such as torchrun started this process as one of several ranks.

    TF_CONFIG is a launch, too. Of the other variables one is enough: where the rest is missing,
    `read_launched_rank` says so. To start all ranks here instead would be another run in each of
    the processes of a broken launch.
    """
    return bool(environment.get(TF_CONFIG)) or launch_variables(environment) is not None


def local_start_note(environment: Mapping[str, str] = os.environ) -> str:
    """Reason that all ranks start on this host although a launcher set variables; empty without."""
    return "" if is_launched(environment) else note_of_local_start(environment)


def is_first_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """True if this process is rank 0 of its launch, or in no launch."""
    return not is_launched(environment) or read_launched_rank(environment).rank == 0


def read_launched_rank(environment: Mapping[str, str] = os.environ) -> LaunchedRank:
    """Return the place of this process; EnvironmentProblem names every variable that is wrong."""
    variables = launch_variables(environment)
    if not environment.get(TF_CONFIG):
        return _rank_of_variables(environment, variables)
    cluster = read_tf_config(environment[TF_CONFIG])
    require_rank(cluster)
    told = _place_in(cluster, environment)
    if variables is None:
        return told
    place = _rank_of_variables(environment, variables)
    if (place.rank, place.world_size) != (told.rank, told.world_size):
        rank, size = variables.named(RANK), variables.named(WORLD_SIZE)
        raise EnvironmentProblem(
            TF_CONFIG_AGREES.problem(
                f"{TF_CONFIG} says rank {told.rank} of {told.world_size}, "
                f"{rank} and {size} say rank {place.rank} of {place.world_size}",
                key=TF_CONFIG,
                set_by=f"{rank}={place.rank}, {size}={place.world_size}, {TF_CONFIG}",
                suggestions=(f"unset {TF_CONFIG}", f"unset {rank} {size}"),
            )
        )
    return replace(place, servers=told.servers)


def read_evaluator(environment: Mapping[str, str] = os.environ) -> LaunchedRank | None:
    """Return the launch that this process evaluates, if TF_CONFIG says so; its rank is none."""
    if not environment.get(TF_CONFIG):
        return None
    cluster = read_tf_config(environment[TF_CONFIG])
    return _place_in(cluster, environment) if cluster.role == EVALUATOR else None


def _place_in(cluster: TFCluster, environment: Mapping[str, str]) -> LaunchedRank:
    host, _, port = cluster.ranks[0].rpartition(":")
    rank = len(cluster.ranks) if cluster.role == EVALUATOR else cluster.rank
    return LaunchedRank(
        rank=rank,
        local_rank=0 if cluster.role == EVALUATOR else cluster.on_host_of(rank).index(rank),
        world_size=len(cluster.ranks),
        master_addr=host,
        master_port=int(port),
        attempt=_attempt(environment),
        servers=cluster.servers,
    )


def _attempt(environment: Mapping[str, str]) -> str:
    return f"{environment.get(RUN_ID, 'run')}/{environment.get(RESTART_COUNT, '0')}"


def _rank_of_variables(
    environment: Mapping[str, str], variables: LaunchVariables | None
) -> LaunchedRank:
    assert variables is not None, "no launcher has set a variable"
    values = variables.values
    problems = list(variables.problems)
    missing = [name for name in _RANK_VARIABLES if not values.get(name)]
    if missing and not problems:
        problems.append(_half_a_launch(variables, missing, environment))
    if problems:
        raise EnvironmentProblem(problems)

    def integer(name: str, least: int, end: int | None) -> int:
        return _read_integer(variables.named(name), values[name], least, end, problems)

    world_size = integer(WORLD_SIZE, 1, None)
    rank = integer(RANK, 0, world_size)
    local_rank = integer(LOCAL_RANK, 0, world_size)
    port = integer(MASTER_PORT, 1, _LARGEST_PORT + 1)
    if problems:
        raise EnvironmentProblem(problems)
    return LaunchedRank(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        master_addr=values[MASTER_ADDR],
        master_port=port,
        attempt=_attempt(environment),
        store_is_hosted=environment.get(AGENT_STORE, "") == str(True),
        launcher=variables.launcher,
    )


def _half_a_launch(
    variables: LaunchVariables, missing: Sequence[str], environment: Mapping[str, str]
) -> Problem:
    """Return the problem of missing variables, by the names of the launcher."""
    names = [variables.named(name) for name in variables.values if name in _RANK_VARIABLES]
    said = {name: environment[name] for name in names if name in environment}
    wanted = [
        name if (own := variables.named(name)) == name else f"{own} (or {name})" for name in missing
    ]
    host, start = f"export {MASTER_ADDR}=HOST of rank 0", STARTS[variables.launcher].format("N")
    return RANK_ENVIRONMENT.problem(
        f"{', '.join(wanted)} not set, so this rank has no place",
        set_by=", ".join(f"{name}={text}" for name, text in said.items()),
        suggestions=(
            host if missing == [MASTER_ADDR] else f"{start} echelon ...",
            f"unset {' '.join(said)}, to start all ranks here",
        ),
    )


def read_node_size(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many ranks the launcher started on this node; EnvironmentProblem without it."""
    size = known_node_size(environment)
    if size is not None:
        return size
    if environment.get(TF_CONFIG):
        cluster = read_tf_config(environment[TF_CONFIG])
        require_rank(cluster)
        return len(cluster.on_host_of(cluster.rank))
    raise EnvironmentProblem(
        RANK_ENVIRONMENT.problem(
            f"{LOCAL_WORLD_SIZE} is not set, so nobody knows which ranks share a node",
            suggestions=(
                "torchrun --nnodes N --nproc-per-node M -m echelon ...",
                f"{LOCAL_WORLD_SIZE}=M, for M ranks on each node",
            ),
        )
    )


def known_node_size(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the ranks on this node by the variables of a launcher; None without them."""
    name, text = LOCAL_WORLD_SIZE, environment.get(LOCAL_WORLD_SIZE)
    variables = launch_variables(environment)
    if not text and variables is not None:
        name, text = variables.named(name), variables.values.get(name)
    if not text:
        return None
    return _one_integer(name, text, None)


def wanted_port(environment: Mapping[str, str] = os.environ) -> int:
    """Return the port that the user asks local ranks to meet at; 0 for any free one."""
    if not environment.get(MASTER_PORT):
        return 0
    return _one_integer(MASTER_PORT, environment[MASTER_PORT], _LARGEST_PORT + 1)


def require_start_here(backend: Backend, environment: Mapping[str, str] = os.environ) -> None:
    """Raise EnvironmentProblem for variables with which no ranks can start on this host."""
    wanted_port(environment)
    problem = interface_problem(environment.get(GLOO_INTERFACE)) if backend == "gloo" else None
    if problem is not None:
        raise EnvironmentProblem(problem)


def check_world_size(place: LaunchedRank, mesh_world_size: int) -> None:
    """Raise EnvironmentProblem unless the launcher started as many ranks as the mesh has."""
    if place.world_size != mesh_world_size:
        raise EnvironmentProblem(
            LAUNCHED_WORLD_SIZE.problem(
                f"{place.world_size} ranks were started, but the mesh has {mesh_world_size}",
                set_by=f"{place.launcher}: {place.world_size} ranks",
                suggestions=[f"{STARTS[place.launcher].format(mesh_world_size)} echelon ..."],
            )
        )


def check_servers(place: LaunchedRank, servers: int) -> None:
    """Raise EnvironmentProblem unless as many ranks were started as servers as the plan has."""
    if place.servers not in (None, servers):
        raise EnvironmentProblem(
            TF_CONFIG_SERVERS.problem(
                f"{TF_CONFIG} has {place.servers} ps tasks of {place.world_size}, but "
                f"servers.count = {servers}",
                key="servers.count",
                set_by=TF_CONFIG,
                suggestions=(f"servers.count = {place.servers}", f"{servers} ps tasks"),
            )
        )


def local_environment(
    world_size: int, environment: Mapping[str, str] = os.environ, *, backend: Backend = "gloo"
) -> dict[str, str]:
    """Return what the process that forks `world_size` local ranks gets, unless the user set it."""
    defaults = {
        OMP_THREADS: str(max(1, int(num_usable_cores()) // world_size)),
        OPENBLAS_THREADS: "1",
        NVML_CHECK: "1",
        GLOO_INTERFACE: "lo0" if sys.platform == "darwin" else "lo",
    }
    unset = {name: value for name, value in defaults.items() if not environment.get(name)}
    return unset | (gpu_environment(environment) if backend == "nccl" else {})


def rank_environment(*, rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return what a local rank finds in its environment, as under torchrun."""
    return {
        RANK: str(rank),
        LOCAL_RANK: str(rank),
        WORLD_SIZE: str(world_size),
        MASTER_ADDR: LOCAL_HOST,
        MASTER_PORT: str(port),
    }


def _one_integer(name: str, text: str, end: int | None) -> int:
    problems: list[Problem] = []
    value = _read_integer(name, text, 1, end, problems)
    if problems:
        raise EnvironmentProblem(problems)
    return value


def _read_integer(
    name: str, text: str, least: int, end: int | None, problems: list[Problem]
) -> int:
    ends = dict.fromkeys((least, least if end is None else end - 1))
    works = [f"{name}={number}" for number in ends]
    limit = f"a whole number from {least}" + ("" if end is None else f" to {end - 1}")
    try:
        value = int(text)
    except ValueError:
        problems.append(
            RANK_ENVIRONMENT.problem(f"{name} = {text!r} is not {limit}", suggestions=works)
        )
        return least
    if value < least or (end is not None and value >= end):
        problems.append(
            RANK_ENVIRONMENT.problem(f"{name} = {value} is not {limit}", suggestions=works)
        )
        return least
    return value
