"""Hosts to run ranks on: this machine, one private namespace of it, or several with real links.

A host is a network namespace. Several hosts hang on one bridge, which lives in a namespace of its
own, so that removing namespaces removes everything; `tc tbf` shapes what each host sends. There
transfer takes time but no CPU, as on a cluster. Needs root, `ip` and `tc`; without them there is
one host, this machine, and no private byte counter.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PREFIX = "echelon-bench-"
_MTU = 9000
_TBF_QUEUE = "400ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Give what a host can send: bits per second, and the bytes that may go out at once."""

    bits_per_s: float
    burst_bytes: int = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Name one host: its namespace (None: this machine's own), interface and address."""

    namespace: str | None
    interface: str
    address: str

    def command(self, *arguments: str) -> list[str]:
        """Return the command line that runs `arguments` on this host."""
        if self.namespace is None:
            return list(arguments)
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def sent_bytes(self) -> dict[str, int] | None:
        """Return the bytes sent so far per interface; None where others share the interfaces."""
        if self.namespace is None:
            return None
        text = _output(*self.command("cat", "/proc/net/dev"))
        counters = (line.partition(":") for line in text.splitlines() if ":" in line)
        return {name.strip(): int(rest.split()[8]) for name, _, rest in counters}

    def free_port(self) -> int:
        """Return a port to meet at: any in a private namespace, else one that is free now."""
        if self.namespace is not None:
            return 29500
        with socket.socket() as probe:
            probe.bind((self.address, 0))
            return probe.getsockname()[1]

    def shape(self, link: Link | None) -> None:
        """Limit what this host sends to others; None lifts the limit."""
        assert self.namespace is not None
        tc = ["tc", "-n", self.namespace, "qdisc"]
        if link is None:
            _succeeds(*tc, "del", "dev", self.interface, "root")
            return
        rate = f"{link.bits_per_s:.0f}bit"
        _output(
            *[*tc, "replace", "dev", self.interface, "root", "tbf", "rate", rate],
            *["burst", str(link.burst_bytes), "latency", _TBF_QUEUE],
        )


@contextlib.contextmanager
def one_host() -> Iterator[Host]:
    """Yield one host with a loopback of its own where the kernel lets us, else this machine."""
    if not can_make_namespaces():
        yield Host(namespace=None, interface="lo", address="127.0.0.1")
        return
    name = _name("only")
    try:
        _make_namespace(name)
        yield Host(namespace=name, interface="lo", address="127.0.0.1")
    finally:
        _remove_namespace(name)


@contextlib.contextmanager
def linked_hosts(count: int) -> Iterator[tuple[Host, ...]]:
    """Yield `count` hosts on one bridge, links not yet shaped; root only."""
    switch = _name("switch")
    hosts: list[Host] = []
    try:
        _make_namespace(switch)
        _output("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _output("ip", "-n", switch, "link", "set", "bridge", "mtu", str(_MTU), "up")
        for index in range(count):
            host = Host(
                namespace=_name(f"host{index}"), interface="e0", address=f"10.77.0.{index + 1}"
            )
            hosts.append(host)
            _attach(host, switch, port=f"port{index}")
        yield tuple(hosts)
    finally:
        for host in hosts:
            assert host.namespace is not None
            _remove_namespace(host.namespace)
        _remove_namespace(switch)


def can_make_namespaces() -> bool:
    """Return whether this process may create network namespaces."""
    if os.geteuid() or shutil.which("ip") is None or shutil.which("unshare") is None:
        return False
    return _succeeds("unshare", "-n", "ip", "link")


def require_root(what: str) -> None:
    """Leave with 3 where this process may not create network namespaces."""
    if not can_make_namespaces():
        print(f"error: {what} need root, `ip` and `tc` (Linux)", file=sys.stderr)
        sys.exit(3)


def remove_leftovers() -> list[str]:
    """Remove the namespaces (and end their processes) of earlier runs that were killed."""
    if not can_make_namespaces():
        return []
    names = [line.split()[0] for line in _output("ip", "netns", "list").splitlines() if line]
    stale = [name for name in names if name.startswith(PREFIX) and not _owner_lives(name)]
    for name in stale:
        _remove_namespace(name)
    return stale


def _owner_lives(name: str) -> bool:
    """Return whether the run that made a namespace still runs: its name tells process and start."""
    owner, _, rest = name.removeprefix(PREFIX).partition("-")
    return owner.isdigit() and _started(int(owner)) == rest.partition("-")[0]


def _started(pid: int) -> str | None:
    """Return when a process started, in clock ticks since boot; None where there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]


def _name(role: str) -> str:
    pid = os.getpid()
    return f"{PREFIX}{pid}-{_started(pid)}-{os.urandom(3).hex()}-{role}"


def _make_namespace(name: str) -> None:
    _output("ip", "netns", "add", name)
    _output("ip", "-n", name, "link", "set", "lo", "up")


def _attach(host: Host, switch: str, *, port: str) -> None:
    """Make a host and put it on the bridge."""
    assert host.namespace is not None
    _make_namespace(host.namespace)
    _output(
        *["ip", "-n", host.namespace, "link", "add", host.interface, "mtu", str(_MTU)],
        *["type", "veth", "peer", "name", port, "mtu", str(_MTU), "netns", switch],
    )
    _output("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
    address = f"{host.address}/24"
    _output("ip", "-n", host.namespace, "addr", "add", address, "dev", host.interface)
    _output("ip", "-n", host.namespace, "link", "set", host.interface, "up")


def _remove_namespace(name: str) -> None:
    """End the processes in a namespace and delete it; one that is not there is no error."""
    listed = subprocess.run(
        ["ip", "netns", "pids", name], check=False, capture_output=True, text=True
    )
    for pid in listed.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    if listed.stdout.split():
        time.sleep(0.2)
    _succeeds("ip", "netns", "del", name)


def _succeeds(*command: str) -> bool:
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def _output(*command: str) -> str:
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(f"{' '.join(command)}: {ran.stderr.strip() or ran.returncode}")
    return ran.stdout
