"""Ranks of one host exchange small tensors through memory: the bits are those of messages."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path

import pytest
import torch

from echelon.cost.bytes.terms import all_gather_bytes, all_reduce_bytes
from echelon.launch.local.supervisor import RankPool
from echelon.parallel.transport import shared_room
from echelon.parallel.transport.shared_room import SharedRoom, open_room
from tests.parallel.transport import shared_room_targets

pytestmark = pytest.mark.skipif(
    not shared_room.KEEPS_ORDER or not Path("/dev/shm").is_dir(),
    reason="stores are seen in another order here, or files are never memory",
)


@pytest.mark.parametrize("world_size", [2, 4])
def test_sums_and_gathers_have_the_bits_of_messages(rank_pool: RankPool, world_size: int) -> None:
    """Larger tensors than a slot go as messages, between the others; more ranks than processors.

    What is told to be sent is told alike of both.
    """
    found = rank_pool.run(shared_room_targets.exchange_often, {"turns": 36}, world_size)
    for rank in found:
        assert rank["shares"]
        assert rank["same"]
        for (name, sent), size in zip(
            rank["sent"], [size for size in rank["numbers"] for _ in range(2)], strict=True
        ):
            formula = all_reduce_bytes if name == "sum" else all_gather_bytes
            assert sent == formula(size, world_size)


def test_no_name_is_left_and_each_host_has_a_room_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = set(Path("/dev/shm").glob("echelon-room-*"))
    assert open_room(1, 0, lambda value: [value], 64) is not None
    assert open_room(2, 0, lambda value: [value, ("another host", None)], 64) is None
    monkeypatch.setattr(shared_room, "KEEPS_ORDER", False)
    found = [shared_room._host(), "the process of another rank"]
    assert len(set(found)) == 2
    assert set(Path("/dev/shm").glob("echelon-room-*")) <= before


def test_an_exchange_waits_for_the_slowest(tmp_path: Path) -> None:
    """The result is not there before the last part is, however long that takes."""
    size = shared_room._bytes(2, 64)
    file = tmp_path / "room"
    file.write_bytes(bytes(size))
    rooms = []
    for index in range(2):
        with file.open("r+b") as stream:
            rooms.append(SharedRoom(mmap.mmap(stream.fileno(), size), 2, index, 64))
    mine, theirs = torch.ones(8), torch.full((8,), 2.0)
    work = rooms[0].add(mine)
    assert not work.is_completed()
    waiting = threading.Thread(target=work.wait)
    waiting.start()
    waiting.join(timeout=0.05)
    assert waiting.is_alive()
    rooms[1].add(theirs).wait()
    waiting.join(timeout=30)
    assert not waiting.is_alive()
    assert torch.equal(mine, torch.full((8,), 3.0))
    assert torch.equal(theirs, mine)
