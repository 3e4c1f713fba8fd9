"""The rank of a process by Slurm, MPI and Kubernetes, alone, inside one another, and by halves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from echelon.core.errors import EnvironmentProblem
from echelon.launch import process_group
from echelon.launch.environment import (
    LAUNCH_VARIABLES,
    VARIABLES,
    is_first_rank,
    is_launched,
    known_node_size,
    local_start_note,
    read_launched_rank,
    read_node_size,
)
from echelon.launch.launchers import first_host, tasks_on_node
from echelon.telemetry.run_directory import list_runs

TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_JOB_NODELIST": "gpu[03-04,07]",
    "SLURM_STEP_NODELIST": "gpu[04,07]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
}
BATCH_SCRIPT = {
    "ENVIRONMENT": "BATCH",
    "SLURM_JOB_ID": "4711",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_NODELIST": "gpu03",
    "SLURM_TASKS_PER_NODE": "8",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "prterun-login-77@1",
}
PALS = {
    "PALS_RANKID": "13",
    "PALS_LOCAL_RANKID": "1",
    "PALS_APID": "6f2c",
    "PMI_RANK": "13",
    "PMI_SIZE": "24",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "12",
    "MASTER_ADDR": "x1000",
}
POD = {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "job-0.svc"}


def read(environment: Mapping[str, str]) -> tuple[str, int, int, int, str]:
    place = read_launched_rank(environment)
    return (place.launcher, place.rank, place.world_size, place.local_rank, place.master_addr)


@pytest.mark.parametrize(
    ("environment", "place", "node_size"),
    [
        (TASK, ("Slurm", 5, 7, 1, "gpu04"), 3),
        (OPEN_MPI, ("Open MPI", 3, 4, 3, "127.0.0.1"), 4),
        (PALS, ("PALS", 13, 24, 1, "x1000"), 12),
        (POD, ("Kubernetes", 2, 4, 0, "job-0.svc"), 1),
        # Hydra, of MPICH and Intel MPI.
        (
            {
                **{"PMI_RANK": "1", "PMI_SIZE": "2"},
                **{"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            },
            ("PMI", 1, 2, 1, "127.0.0.1"),
            2,
        ),
        # srun --mpi=pmix: the rank twice, the rest by Slurm.
        ({**TASK, "PMIX_RANK": "5"}, ("Slurm", 5, 7, 1, "gpu04"), 3),
        # A script that exports the half of it, for srun to complete.
        (
            {**TASK, "WORLD_SIZE": "7", "MASTER_ADDR": "gpu04-ib"},
            ("Slurm", 5, 7, 1, "gpu04-ib"),
            3,
        ),
        # mpirun in an allocation of Slurm: its daemons are tasks, one on each node.
        (
            {**TASK, **OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            ("Open MPI", 3, 4, 3, "gpu04"),
            2,
        ),
    ],
    ids=["slurm", "open-mpi", "pals", "pod", "hydra", "pmix", "exported", "mpirun-in-slurm"],
)
def test_a_rank_is_read_as_its_launcher_writes_it(
    environment: dict[str, str], place: tuple[str, int, int, int, str], node_size: int
) -> None:
    assert is_launched(environment)
    assert read(environment) == place
    assert read_node_size(environment) == node_size
    assert is_first_rank(environment) == (place[1] == 0)
    assert environment.keys() <= {*VARIABLES, *LAUNCH_VARIABLES}


def test_torchrun_inside_of_srun_counts_alone() -> None:
    inner = {
        **{"RANK": "9", "WORLD_SIZE": "56", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"},
        **{"MASTER_ADDR": "gpu04", "MASTER_PORT": "29400"},
    }
    place = read_launched_rank({**TASK, **inner})
    assert (place.launcher, place.rank, place.world_size, place.master_port) == (
        "torchrun",
        9,
        56,
        29400,
    )
    assert known_node_size({**TASK, **inner}) == 8


def test_ranks_of_a_launch_meet_at_one_port_and_launches_at_others() -> None:
    ports = {
        read_launched_rank({**TASK, "SLURM_PROCID": str(rank), "SLURM_LOCALID": "0"}).master_port
        for rank in range(7)
    }
    other_step = read_launched_rank({**TASK, "SLURM_STEP_ID": "1"}).master_port
    other_job = read_launched_rank({**TASK, "SLURM_JOB_ID": "4712"}).master_port
    assert len({*ports, other_step, other_job}) == 3
    assert all(15_000 <= port < 25_000 for port in (*ports, other_step, other_job))
    assert read_launched_rank({**TASK, "MASTER_PORT": "1234"}).master_port == 1234
    # Of mpirun in a job, only processes on other nodes are in a step.
    first = {name: text for name, text in TASK.items() if name != "SLURM_STEP_ID"}
    on_nodes = [read_launched_rank({**outer, **OPEN_MPI}).master_port for outer in (TASK, first)]
    assert on_nodes[0] == on_nodes[1]
    assert read_launched_rank(POD).master_port == 29500


@pytest.mark.parametrize(
    ("environment", "noted"),
    [
        ({}, ""),
        # The login node of salloc, srun --pty, mpirun -n 1.
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "gpu[1-2]"}, ""),
        ({**TASK, "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}, ""),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, ""),
        # A shell of salloc on a node of its own, and the script of sbatch.
        (
            {**BATCH_SCRIPT, "ENVIRONMENT": "", "SLURM_STEP_ID": "4294967290"},
            "SLURM_NTASKS = 8, but this process is no task of srun",
        ),
        (BATCH_SCRIPT, "SLURM_NTASKS = 8, but this process is no task of srun"),
        ({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, ""),
        ({"JOB_COMPLETION_INDEX": "3"}, "this pod does all of the work alone"),
    ],
    ids=["none", "salloc", "pty", "mpirun-1", "shell", "sbatch", "sbatch-no-ntasks", "pod"],
)
def test_what_is_no_task_starts_its_ranks_here(environment: dict[str, str], noted: str) -> None:
    assert not is_launched(environment)
    assert is_first_rank(environment)
    note = local_start_note(environment)
    assert (noted in note) if noted else not note


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
            r"SLURM_LOCALID \(or LOCAL_RANK\), SLURM_JOB_NODELIST \(or MASTER_ADDR\) not set",
        ),
        ({"SLURM_PROCID": "1", "SLURM_LOCALID": "0"}, r"SLURM_NTASKS \(or WORLD_SIZE\)"),
        ({"PMIX_RANK": "1"}, "WORLD_SIZE, MASTER_ADDR not set"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "8"}, "MASTER_ADDR not set"),
        ({"JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "job-0"}, "WORLD_SIZE not set"),
        ({**TASK, "SLURM_PROCID": "7"}, "SLURM_PROCID = 7 is not a whole number from 0 to 6"),
        ({**TASK, "SLURM_PROCID": "x"}, "SLURM_PROCID = 'x' is not a whole number"),
        ({**TASK, "SLURM_STEP_NODELIST": "gpu[04"}, r"SLURM_STEP_NODELIST = 'gpu\[04' is no list"),
    ],
)
def test_half_a_launch_is_refused_by_name(environment: dict[str, str], said: str) -> None:
    assert is_launched(environment)
    with pytest.raises(EnvironmentProblem, match=said) as caught:
        read_launched_rank(environment)
    assert set(caught.value.rules) == {"rank-environment"}
    assert caught.value.problems[0].suggestions


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({**TASK, "WORLD_SIZE": "8"}, "the number of ranks is 8 by WORLD_SIZE and 7 by SLURM_STEP"),
        ({**TASK, "RANK": "0"}, "the rank of this process is 0 by RANK and 5 by SLURM_PROCID"),
        ({**TASK, "PMIX_RANK": "4"}, "4 by PMIX_RANK and 5 by SLURM_PROCID"),
        ({**OPEN_MPI, "PMI_RANK": "0"}, "3 by OMPI_COMM_WORLD_RANK and 0 by PMI_RANK"),
        ({**POD, "RANK": "1", "WORLD_SIZE": ""}, "1 by RANK and 2 by JOB_COMPLETION_INDEX"),
    ],
)
def test_launchers_that_contradict_each_other_are_refused(
    environment: dict[str, str], said: str
) -> None:
    with pytest.raises(EnvironmentProblem, match=said) as caught:
        read_launched_rank(environment)
    assert set(caught.value.rules) == {"launchers-agree"}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node[01-03,07],gpu5", "node01"),
        ("gpu5,node[01-03]", "gpu5"),
        ("rack[0-1]n[4,6]", "rack0n4"),
        ("a-b.c.org", "a-b.c.org"),
        ("localhost", "localhost"),
        ("node[01-03", ""),
        ("node[a]", ""),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list_of_slurm(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_tasks_of_a_node_by_the_short_form() -> None:
    assert [tasks_on_node("4(x2),3", node) for node in range(4)] == [4, 4, 3, None]
    assert tasks_on_node("four", 0) is None


def test_a_task_that_sees_one_gpu_drives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    cuda = SimpleNamespace(
        device_count=lambda: 1, set_device=lambda device: chosen.append(device.index)
    )
    monkeypatch.setattr(process_group.torch, "cuda", cuda)
    assert process_group.device_of("nccl", 3, launcher="Slurm").index == 0
    with pytest.raises(EnvironmentProblem, match="local rank 3 needs GPU 3"):
        process_group.device_of("nccl", 3)
    assert chosen == [0]


def run_task(rank: int, folder: Path, **variables: str) -> subprocess.Popen[str]:
    """Start `echelon train` as srun does: every variable of other launchers is gone."""
    kept = {name: text for name, text in os.environ.items() if name not in LAUNCH_VARIABLES}
    task = {
        **{"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NODEID": "0"},
        **{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NTASKS": "2"},
        **{"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2"},
        **{"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables},
    }
    settings = ("train.steps=2", "optimizer.warmup_steps=1", "mesh.dp_replicate=2")
    command = [
        *(sys.executable, "-m", "echelon", "train", "nano"),
        *(part for one in settings for part in ("--set", one)),
    ]
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**kept, **task},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="the loopback interface is named as on Linux")
def test_two_tasks_of_slurm_train_one_run(tmp_path: Path) -> None:
    tasks = [run_task(rank, tmp_path) for rank in range(2)]
    try:
        output = [task.communicate(timeout=120) for task in tasks]
    finally:
        for task in tasks:
            if task.poll() is None:
                os.killpg(task.pid, signal.SIGKILL)
    assert [task.returncode for task in tasks] == [0, 0], output
    (run,) = list_runs(tmp_path / "runs")
    assert run.plan().mesh.world_size == 2
    assert sorted(path.name for path in run.logs.glob("rank-*.log")) == [
        "rank-0000.log",
        "rank-0001.log",
    ]
    assert "steps" in output[0][0]
    assert not output[1][0], "rank 0 alone tells the result"


def test_two_tasks_with_half_of_it_train_nothing(tmp_path: Path) -> None:
    tasks = [run_task(rank, tmp_path, SLURM_LOCALID="") for rank in range(2)]
    errors = [task.communicate(timeout=60)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [3, 3]
    assert all("SLURM_LOCALID (or LOCAL_RANK) not set" in error for error in errors)
    assert not (tmp_path / "runs").exists()
