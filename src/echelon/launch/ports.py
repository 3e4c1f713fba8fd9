"""The port where local ranks meet: taken before any process starts, so a clash is told at once."""

from __future__ import annotations

import errno
import socket

from echelon.core.errors import EnvironmentProblem
from echelon.core.rulebook.launch import PORT_IN_USE

LOCAL_HOST = "127.0.0.1"
_BACKLOG = 1024


def listen(port: int) -> socket.socket:
    """Return a socket that listens on `port` (0: a free one); EnvironmentProblem if it is taken."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOCAL_HOST, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        reason = "is in use" if error.errno == errno.EADDRINUSE else "may not be opened"
        raise EnvironmentProblem(
            PORT_IN_USE.problem(
                f"port {port} of this machine {reason}",
                key="MASTER_PORT",
                works=["another port", "MASTER_PORT unset: a free one is taken"],
            )
        ) from error
    return listener
