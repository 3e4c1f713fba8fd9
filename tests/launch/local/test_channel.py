"""Messages arrive whole, in order, however the bytes are cut."""

from __future__ import annotations

import os
import pickle
import socket
import struct

import pytest

from echelon.launch.local.channel import Channel


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
