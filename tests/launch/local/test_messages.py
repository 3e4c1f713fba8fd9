"""A target is named so that another process finds it; what no process finds is refused."""

from __future__ import annotations

import os
import pickle
import socket
import struct
from collections.abc import Callable
from dataclasses import replace

import pytest

from echelon.core.choices.local_sgd import LocalSgd
from echelon.core.errors import ConfigError
from echelon.launch.local.messages import (
    Channel,
    ElasticRanks,
    Limits,
    Notice,
    RankJob,
    TargetReference,
    elastic_ranks,
    find_target,
    group_place,
    name_target,
)
from tests.proof.layouts import layout
from tests.proof.run.local_sgd import with_islands

ISLANDS = ElasticRanks(num_ranks=6, least=1, restarts=1, size=2)


def named() -> str:
    return "found"


def test_a_function_and_its_name_are_the_same_target() -> None:
    by_function, by_text = name_target(named), name_target(f"{__name__}:named")
    assert (by_function.module, by_function.name) == (by_text.module, by_text.name)
    assert by_function.file == __file__
    assert find_target(by_text) is named


def test_a_module_off_the_path_is_found_by_its_file() -> None:
    target = TargetReference(module="nowhere_to_import", name="named", file=__file__)
    assert find_target(target)() == "found"


@pytest.mark.parametrize("target", ["no.colon", ":named", "module:", lambda: None])
def test_what_has_no_name_is_refused(target: str | Callable[[], None]) -> None:
    with pytest.raises(ConfigError) as caught:
        name_target(target)
    assert caught.value.rules == ("target-not-found",)


@pytest.mark.parametrize(
    "target",
    [
        TargetReference(module="no_such_module", name="named"),
        TargetReference(module=__name__, name="absent"),
        TargetReference(module=__name__, name="__doc__"),
    ],
)
def test_what_is_not_there_is_refused(target: TargetReference) -> None:
    with pytest.raises(ConfigError) as caught:
        find_target(target)
    assert caught.value.rules == ("target-not-found",)


def test_a_job_knows_its_world_and_messages_survive_the_channel() -> None:
    job = RankJob(
        number=1,
        target=name_target(named),
        argument=None,
        labels=("pp0", "pp1"),
        backend="gloo",
        port=1,
        limits=Limits(),
        introduce=False,
    )
    assert job.world_size == 2
    assert pickle.loads(pickle.dumps(job)) == job
    assert all(pickle.loads(pickle.dumps(notice)) is notice for notice in Notice)


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    left, right = Channel(ours, send_timeout_s=5.0), Channel(theirs)
    yield left, right
    left.close()
    right.close()


def test_messages_arrive_in_order(pair: tuple[Channel, Channel]) -> None:
    left, right = pair
    for number in range(3):
        left.send({"number": number})
    assert [m["number"] for m in right.receive(1.0)] == [0, 1, 2]  # type: ignore[index]
    assert right.receive(0) == []


def test_half_a_message_is_kept_until_the_rest_comes() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        channel = Channel(theirs)
        body = pickle.dumps("whole")
        data = struct.pack("!I", len(body)) + body
        ours.sendall(data[:7])
        assert channel.receive(1.0) == []
        ours.sendall(data[7:] + data)
        assert channel.receive(1.0) == ["whole", "whole"]
        channel.close()


def test_the_end_is_told(pair: tuple[Channel, Channel]) -> None:
    left, right = pair
    left.send("last")
    left.close()
    assert right.receive(1.0) == ["last"]
    with pytest.raises(EOFError):
        right.receive(1.0)


def test_a_small_message_is_dropped_when_nobody_reads(pair: tuple[Channel, Channel]) -> None:
    left, right = pair
    for _ in range(20_000):
        left.send_if_room("x" * 100)
    received = right.receive(1.0)
    assert 0 < len(received) < 20_000


def test_open_files_travel_with_a_message(pair: tuple[Channel, Channel]) -> None:
    left, right = pair
    read, write = os.pipe()
    left.send_with_descriptors({"for": 1}, [write])
    os.close(write)
    message, (received,) = right.receive_with_descriptors(1)
    os.write(received, b"here")
    os.close(received)
    assert message == {"for": 1}
    assert os.read(read, 10) == b"here"
    os.close(read)


def test_an_island_is_a_block_of_ranks() -> None:
    assert ISLANDS.islands == ((0, 1), (2, 3), (4, 5))
    assert ISLANDS.island_of(3) == (2, 3)
    assert ISLANDS.name_of(5) == "island 2 (ranks 4 to 5)"
    assert replace(ISLANDS, size=1).name_of(5) == "island 5 (rank 5)"


def test_islands_are_apart_and_other_ranks_together() -> None:
    place = group_place(ISLANDS, 3, 6, 0)
    assert (place.name, place.rank, place.world_size) == ("group/2/0", 1, 2)
    assert group_place(ISLANDS, 3, 6, 2).name == "group/2/2"
    together = group_place(None, 1, 3, 0)
    assert (together.name, together.rank, together.world_size) == ("group", 1, 3)


def test_a_plan_says_which_ranks_may_be_lost() -> None:
    plan = with_islands(layout(tp=2), 3, min_islands=2, restarts=4)
    found = elastic_ranks(plan)
    assert found is not None
    assert (found.size, found.least, found.restarts) == (2, 2, 4)
    assert len(found.islands) == plan.mathematics.local_sgd.islands == 3
    undisturbed = replace(
        plan,
        mathematics=replace(plan.mathematics, local_sgd=plan.mathematics.local_sgd.undisturbed()),
    )
    assert elastic_ranks(undisturbed) is None
    assert not LocalSgd(min_islands=1).is_elastic
