"""The key-value store where the ranks of a run meet."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import PrefixStore, Store

from echelon.core.errors import EnvironmentProblem
from echelon.core.rulebook.launch import PORT_IN_USE, RANK_NEVER_JOINED
from echelon.launch.environment import Place
from echelon.launch.ports import LOCAL_HOST

__all__ = ["PrefixStore", "Store", "host_store", "join_store", "open_place"]


def host_store(port: int, descriptor: int) -> Store:
    """Return a store that this process serves on an already listening socket."""
    return TCPStore(
        LOCAL_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
    )


def join_store(port: int, timeout_s: float, host: str = LOCAL_HOST) -> Store:
    """Return a client of the store at `host`:`port`."""
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def open_place(place: Place, timeout_s: float) -> Store:
    """Return the store of a launched run: the launcher's, or one that rank 0 hosts."""
    where = f"{place.master_addr}:{place.master_port}"
    if place.hosted or place.rank > 0:
        try:
            return join_store(place.master_port, timeout_s, place.master_addr)
        except RuntimeError as error:
            raise EnvironmentProblem(
                RANK_NEVER_JOINED.problem(
                    f"rank {place.rank} reached no store at {where} within {timeout_s:g} s"
                )
            ) from error
    try:
        return TCPStore(
            place.master_addr,
            place.master_port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
    except RuntimeError as error:
        if "in use" not in str(error).lower():
            raise
        raise EnvironmentProblem(
            PORT_IN_USE.problem(f"port {place.master_port} is in use", key="MASTER_PORT")
        ) from error
