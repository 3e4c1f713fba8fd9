"""Two hosts on one machine: network namespaces with a router between them, which can be cut.

    host a -- 10.98.1.0/24 -- router -- 10.98.2.0/24 -- host b      data: what a test cuts
    host a ------------------ 10.98.9.0/24 ----------- host b      control: the launcher's store

Each has a host name of its own, so that ranks know of each other what ranks of two machines do.
Cut is what the router forwards: both cables stay in, and nobody is told.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

DATA = ("10.98.1.2", "10.98.2.2")
CONTROL = ("10.98.9.1", "10.98.9.2")
ROUTER = ("10.98.1.1", "10.98.2.1")
_PREFIX = f"desync{os.getpid()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoHosts:
    """Run programs on two hosts, and cut the link between them."""

    names: tuple[str, str]
    router: str

    def start(
        self, host: int, command: Sequence[str], environment: Mapping[str, str], output: int
    ) -> subprocess.Popen[bytes]:
        """Start a program on a host; what it prints goes to the descriptor `output`."""
        name = self.names[host]
        inside = f'hostname {name} && exec "$@"'
        return subprocess.Popen(
            ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", inside, "sh", *command],
            env={**environment, "GLOO_SOCKET_IFNAME": f"{name}-d"},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )

    def cut(self) -> None:
        """Let the router drop all packets."""
        _run("ip", "netns", "exec", self.router, "sysctl", "-qw", "net.ipv4.ip_forward=0")


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Hold two hosts open; CalledProcessError where this machine has no such things."""
    hosts = TwoHosts(names=(f"{_PREFIX}a", f"{_PREFIX}b"), router=f"{_PREFIX}r")
    try:
        for name in (*hosts.names, hosts.router):
            _run("ip", "netns", "add", name)
            _inside(name, "ip", "link", "set", "lo", "up")
        for index, name in enumerate(hosts.names):
            _cable((name, f"{name}-d", DATA[index]), (hosts.router, f"r{index}", ROUTER[index]))
            _inside(name, "ip", "route", "add", "10.98.0.0/16", "via", ROUTER[index])
        _cable(*((name, f"{name}-c", CONTROL[at]) for at, name in enumerate(hosts.names)))
        _inside(hosts.router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        yield hosts
    finally:
        for name in (*hosts.names, hosts.router):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def why_not() -> str:
    """Return why there can be no two hosts here; "" where there can."""
    missing = [name for name in ("ip", "unshare", "sysctl", "hostname") if not shutil.which(name)]
    if missing:
        return f"{', '.join(missing)} not found"
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    try:
        with two_hosts():
            return ""
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.decode().strip()}"


def _cable(*ends: tuple[str, str, str]) -> None:
    (here, one, _), (there, other, _) = ends
    _run("ip", "link", "add", one, "netns", here, "type", "veth", "peer", other, "netns", there)
    for name, device, address in ends:
        _inside(name, "ip", "address", "add", f"{address}/24", "dev", device)
        _inside(name, "ip", "link", "set", device, "up")


def _inside(name: str, *command: str) -> None:
    _run("ip", "netns", "exec", name, *command)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
