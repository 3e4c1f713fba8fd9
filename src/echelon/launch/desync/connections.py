# SPDX-License-Identifier: Apache-2.0
"""What the TCP connections of a process say: what nobody acknowledges, and what arrives. No torch.

A link that is cut without a word tells its two ends one thing only: what one sends is acknowledged
no more, so the system sends it again and again. Linux tells this of each connection (``TCP_INFO``,
tcp(7)); elsewhere, and of transports that are no TCP, nothing is known.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import sys
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")
_INFO = struct.Struct("=8B24I")
"""``struct tcp_info`` up to ``tcpi_total_retrans``."""
_STATE = 0  # place in it: `tcpi_state`
_REPEATS = 2  # `tcpi_retransmits`: how often in a row
_UNACKNOWLEDGED = 12  # `tcpi_unacked`
_DATA_CAME = 19  # `tcpi_last_data_recv`, milliseconds ago
_WORD_CAME = 20  # `tcpi_last_ack_recv`, milliseconds ago
_ESTABLISHED = 1  # a state
_SILENT_MS = 500
"""How many milliseconds an acknowledgement must be missing: several round trips of a long link."""
_ARRIVES_MS = 300
"""How many milliseconds ago data may have come that still arrives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StalledConnection:
    """Say of a connection that its other end has ceased to acknowledge what it is sent."""

    local: str
    peer: str
    packets: int
    """How many have been sent and not been acknowledged."""
    repeats: int
    """How often the first of them was sent again."""
    silent_s: float
    """Seconds since anything at all came from the other end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connections:
    """Hold what the connections of one process say at one time; an end is ``address:port``."""

    ends: tuple[str, ...] = ()
    """Its own ends."""
    stalled: tuple[StalledConnection, ...] = ()
    """Those of which the other end is silent."""
    arriving: tuple[str, ...] = ()
    """The other ends from which data has just come."""


def own_connections(without: Container[int] = ()) -> Connections | None:
    """Return what the connections of this process say, but of those at the ports `without`.

    None where the system does not tell.
    """
    if sys.platform != "linux" or not _DESCRIPTORS.is_dir():
        return None
    ends: set[str] = set()
    stalled: list[StalledConnection] = []
    arriving: list[str] = []
    for one in tcp_sockets(without):
        # Another thread may just have closed it.
        with one, contextlib.suppress(OSError):
            local, peer = end_of(one.getsockname()), end_of(one.getpeername())
            info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
            if len(info) < _INFO.size:
                continue
            told = _INFO.unpack(info)
            if told[_STATE] != _ESTABLISHED:
                continue
            ends.add(local)
            if told[_DATA_CAME] < _ARRIVES_MS:
                arriving.append(peer)
            if told[_UNACKNOWLEDGED] and told[_REPEATS] and told[_WORD_CAME] >= _SILENT_MS:
                stalled.append(
                    StalledConnection(
                        local=local,
                        peer=peer,
                        packets=told[_UNACKNOWLEDGED],
                        repeats=told[_REPEATS],
                        silent_s=told[_WORD_CAME] / 1e3,
                    )
                )
    return Connections(ends=tuple(sorted(ends)), stalled=tuple(stalled), arriving=tuple(arriving))


def tcp_sockets(without: Container[int] = ()) -> Iterator[socket.socket]:
    """Yield the connected TCP sockets of this process, each as a duplicate that the taker closes.

    Those with one end at a port of `without` are left out.
    """
    for name in os.listdir(_DESCRIPTORS):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            one = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        try:
            internet = one.family in (socket.AF_INET, socket.AF_INET6)
            wanted = internet and one.type == socket.SOCK_STREAM
            ports = {one.getsockname()[1], one.getpeername()[1]} if wanted else {0}
        except OSError:
            wanted, ports = False, {0}
        if not wanted or any(port in without for port in ports):
            one.close()
        else:
            yield one


def end_of(address: tuple[object, ...]) -> str:
    """Return an end as text; an IPv4 address that is written as one of IPv6 is the same."""
    host = str(address[0]).removeprefix("::ffff:")
    return f"[{host}]:{address[1]}" if ":" in host else f"{host}:{address[1]}"
