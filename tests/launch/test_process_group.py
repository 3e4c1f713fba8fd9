"""The store where ranks meet, the device of a rank, and its process group: one process here."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from echelon.core.errors import EnvironmentProblem
from echelon.launch.context import RankProgress
from echelon.launch.environment import LOCAL_HOST, LaunchedRank
from echelon.launch.local.rank_processes import listen_on_port
from echelon.launch.process_group import (
    PrefixStore,
    device_of,
    host_store,
    join_store,
    joined_ranks,
    open_launch_store,
    require_devices,
)

CPU = torch.device("cpu")


def launched(rank: int, port: int) -> LaunchedRank:
    """Return the place of one of two ranks, as torchrun would say it."""
    return LaunchedRank(
        rank=rank, local_rank=rank, world_size=2, master_addr=LOCAL_HOST, master_port=port
    )


def test_a_store_is_served_on_a_socket_that_listens_already() -> None:
    listener = listen_on_port(0)
    port = listener.getsockname()[1]
    served = host_store(port, listener.detach())
    served.set("key", "value")
    assert join_store(port, 5.0).get("key") == b"value"


def test_the_first_rank_of_a_launch_hosts_the_store_and_the_others_join() -> None:
    with listen_on_port(0) as free:
        port = free.getsockname()[1]
    hosted = open_launch_store(launched(0, port), 5.0)
    hosted.set("from", "rank 0")
    assert open_launch_store(launched(1, port), 5.0).get("from") == b"rank 0"
    with pytest.raises(EnvironmentProblem, match=f"port {port} is in use") as caught:
        open_launch_store(launched(0, port), 5.0)
    assert caught.value.rules == ("port-in-use",)


def test_a_store_that_nobody_serves_is_named() -> None:
    with listen_on_port(0) as free:
        port = free.getsockname()[1]
    with pytest.raises(EnvironmentProblem, match=f"rank 1 reached no store at .*:{port}") as caught:
        open_launch_store(launched(1, port), 0.2)
    assert caught.value.rules == ("rank-never-joined",)


def test_more_ranks_than_gpus_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(EnvironmentProblem, match="local rank 2 needs GPU 2, but torch sees 2") as e:
        device_of("nccl", 2)
    assert e.value.rules == ("enough-devices",)
    assert device_of("gloo", 2).type == "cpu"
    with pytest.raises(EnvironmentProblem, match="the mesh asks for 3, and torch sees 2 here") as e:
        require_devices("nccl", 3, set_by="preset big")
    assert e.value.rules == ("enough-devices",)
    assert e.value.problems[0].suggestions[0] == "a mesh of up to 2 ranks"
    require_devices("nccl", 2)
    require_devices("gloo", 64)


def test_after_an_error_the_communicators_of_nccl_are_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[str] = []
    shut_down = dist.destroy_process_group
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "destroy_process_group", lambda: closed.append("shut down"))
    monkeypatch.setattr(
        "torch.distributed.distributed_c10d._abort_process_group", lambda: closed.append("aborted")
    )

    def run(error: Exception | None) -> None:
        group = joined_ranks(
            HashStore(), CPU, rank=0, labels=[""], progress=RankProgress(), timeout_s=10.0
        )
        with group:
            if error is not None:
                raise error

    with pytest.raises(KeyError):
        run(KeyError("a bug"))
    shut_down()
    run(None)
    shut_down()
    assert closed == ["aborted", "shut down"]


def test_a_rank_knows_its_place_and_its_group_ends_with_it() -> None:
    store, progress = HashStore(), RankProgress()

    def fail() -> None:
        with joined_ranks(
            store, CPU, rank=0, labels=["dp0"], progress=progress, timeout_s=10.0
        ) as context:
            assert (context.rank, context.world_size, context.label) == (0, 1, "dp0")
            assert (context.device, context.progress) == (CPU, progress)
            context.store.set("mine", "1")
            one = torch.ones(1)
            dist.all_reduce(one)
            assert one.item() == 1
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not dist.is_initialized()
    assert PrefixStore("target", store).get("mine") == b"1"
