"""What the system tells of connections: real ones, of which one end hears nothing any more."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from echelon.launch.desync import connections
from echelon.launch.desync.connections import end_of, own_connections, tcp_sockets
from tests.launch.desync.planted import deafen

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells TCP_INFO so")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Hold both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
        with one, other:
            yield one, other


def test_an_end_that_hears_nothing_leaves_what_it_is_sent_unacknowledged(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    here, there = end_of(one.getsockname()), end_of(other.getsockname())
    one.sendall(b"read")
    assert other.recv(4) == b"read"
    found = own_connections()
    assert found is not None
    assert {here, there} <= {*found.ends}
    assert here in found.arriving, "the other end has just got data from here"
    assert all(each.local not in (here, there) for each in found.stalled)
    deafen(other)
    one.sendall(b"lost" * 10)
    # How long that lasts is the system's: it counts from half a second on here.
    monkeypatch.setattr(connections, "_SILENT_MS", 100)
    stalled = []
    while not stalled:
        time.sleep(0.05)
        found = own_connections()
        assert found is not None
        stalled = [each for each in found.stalled if each.local == here]
    assert (stalled[0].peer, stalled[0].packets) == (there, 1)
    assert stalled[0].repeats >= 1
    assert stalled[0].silent_s >= 0.1
    # Who only receives has sent nothing that could be missing.
    assert all(each.local != there for each in found.stalled)


def test_a_peer_that_does_not_read_is_no_cut_link(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    monkeypatch.setattr(connections, "_SILENT_MS", 0)
    one.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            one.send(bytes(1 << 16))
    time.sleep(0.6)
    found = own_connections()
    assert found is not None
    assert all(each.local != end_of(one.getsockname()) for each in found.stalled)
    assert other.fileno() >= 0


def test_connections_of_a_port_are_left_out(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = pair
    port = other.getsockname()[1]
    found = own_connections(without={port})
    assert found is not None
    assert end_of(one.getsockname()) not in found.ends
    kept: list[str] = []
    for each in tcp_sockets():
        with each:
            kept.append(end_of(each.getsockname()))
    assert end_of(one.getsockname()) in kept
    assert one.send(b"x") == 1, "only a duplicate was closed"


def test_an_end_is_written_in_one_way() -> None:
    assert end_of(("::ffff:10.0.0.1", 80, 0, 0)) == end_of(("10.0.0.1", 80)) == "10.0.0.1:80"
    assert end_of(("fe80::1", 80, 0, 0)) == "[fe80::1]:80"


def test_elsewhere_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(connections, "_DESCRIPTORS", tmp_path / "none")
    assert own_connections() is None
