# SPDX-License-Identifier: Apache-2.0
"""Whole messages over a stream socket, without ever waiting for the rest of one.

A rank may be stopped in the middle of a message; its supervisor must still hear the others.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
import threading

_HEADER = struct.Struct("!I")
_CHUNK = 1 << 20  # bytes


class Channel:
    """Send and receive pickled messages over one end of a socket pair."""

    def __init__(self, sock: socket.socket, *, send_timeout_s: float | None = None) -> None:
        """Take over `sock`; a send that takes longer than `send_timeout_s` is a broken pipe."""
        self._socket = sock
        self._socket.settimeout(send_timeout_s)
        self._lock = threading.Lock()
        self._buffer = bytearray()

    def fileno(self) -> int:
        """Return the descriptor, for `select`."""
        return self._socket.fileno()

    def send(self, message: object) -> None:
        """Send one message; OSError where the other side is gone."""
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        with self._lock:
            self._socket.sendall(_HEADER.pack(len(body)) + body)

    def send_if_room(self, message: object) -> None:
        """Send one small message unless the other side has stopped reading."""
        if select.select([], [self._socket], [], 0)[1]:
            self.send(message)

    def send_with_descriptors(self, message: object, descriptors: list[int]) -> None:
        """Send one message and duplicates of open file descriptors with it."""
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        with self._lock:
            socket.send_fds(self._socket, [_HEADER.pack(len(body))], descriptors)
            self._socket.sendall(body)

    def receive_with_descriptors(self, most: int) -> tuple[object, list[int]]:
        """Wait for one message sent by `send_with_descriptors`; EOFError at the end."""
        header, descriptors, _, _ = socket.recv_fds(self._socket, _HEADER.size, most)
        header += self._exactly(_HEADER.size - len(header))
        (size,) = _HEADER.unpack(header)
        return pickle.loads(self._exactly(size)), descriptors

    def receive(self, timeout_s: float) -> list[object]:
        """Return the whole messages that are here within `timeout_s`; EOFError at the end."""
        if not select.select([self._socket], [], [], timeout_s)[0]:
            return []
        try:
            data = self._socket.recv(_CHUNK)
        except ConnectionResetError:
            data = b""
        if not data:
            raise EOFError("the other side closed the channel")
        self._buffer += data
        return self._whole_messages()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _whole_messages(self) -> list[object]:
        messages: list[object] = []
        while len(self._buffer) >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + size
            if len(self._buffer) < end:
                break
            messages.append(pickle.loads(bytes(self._buffer[_HEADER.size : end])))
            del self._buffer[:end]
        return messages

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self._socket.recv(size - len(data))
            if not part:
                raise EOFError("the other side closed the channel")
            data += part
        return bytes(data)


def channel_pair(*, send_timeout_s: float) -> tuple[Channel, socket.socket]:
    """Return our end as a channel and the other end as a socket to hand over."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Channel(ours, send_timeout_s=send_timeout_s), theirs
