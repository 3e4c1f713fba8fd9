# SPDX-License-Identifier: Apache-2.0
"""What `ec.threaded` is asked for: how many replicas, where each is, and what is cut."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from echelon.core.errors import ConfigError, Problem
from echelon.core.rulebook.module import THREADED_ARGUMENT
from echelon.core.rules import did_you_mean
from echelon.parallel.threads.workers import replica_devices

Place = str | int | torch.device
"""Where a replica is: a name ("cpu", "cuda:1"), the number of a GPU, or a device."""


def devices_of(
    module: nn.Module, replicas: int | None, devices: Sequence[Place] | None
) -> list[torch.device]:
    """Return where each replica is, the primary first; ConfigError where these are no such places.

    A GPU without a number is the current one.
    """
    if (replicas is None) == (devices is None):
        said = "neither is said" if replicas is None else "both are said"
        raise _refused("replicas", f"how many replicas, or where they are: {said}", "replicas=2")
    if devices is not None:
        return _listed(devices)
    if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 1:
        raise _refused("replicas", f"replicas = {replicas!r}", "replicas=2", "replicas=1")
    first = next((one.device for one in (*module.parameters(), *module.buffers())), None)
    found = replica_devices(_numbered(first or torch.device("cpu")), replicas)
    if found[0].type == "cuda" and replicas > torch.cuda.device_count():
        there = torch.cuda.device_count()
        raise _refused(
            "replicas",
            f"replicas = {replicas}, and this host has {there} GPUs",
            f"replicas={there}",
        )
    return found


def _listed(devices: Sequence[Place]) -> list[torch.device]:
    """Return the devices of a list: all of one type, each of which is there, no GPU twice."""
    if isinstance(devices, (str, int, torch.device)) or not devices:
        raise _refused(
            "devices", f"devices = {devices!r} is no list of devices", "devices=['cpu', 'cpu']"
        )
    found: list[torch.device] = []
    for one in devices:
        try:
            found.append(
                _numbered(torch.device("cuda", one) if type(one) is int else torch.device(one))
            )
        except (RuntimeError, TypeError) as error:
            told = str(error).partition("\n")[0]
            raise _refused(
                "devices", f"{one!r} is no device: {told}", "'cpu'", "'cuda:0'"
            ) from None
    problems = list(_misplaced(found))
    if problems:
        raise ConfigError(problems)
    return found


def _misplaced(devices: Sequence[torch.device]) -> Iterator[Problem]:
    def problem(message: str, *ways: str) -> Problem:
        return THREADED_ARGUMENT.problem(message, key="devices", suggestions=ways)

    kinds = sorted({one.type for one in devices})
    if len(kinds) > 1:
        yield problem(
            f"devices are of {len(kinds)} types ({', '.join(kinds)}): replicas compute alike",
            f"devices={[str(one) for one in devices if one.type == devices[0].type]}",
        )
    elif kinds not in (["cpu"], ["cuda"]):
        yield problem(f"devices are of the type {kinds[0]}", "'cpu'", "'cuda:0'")
    there = torch.cuda.device_count()
    gone = [str(one) for one in devices if one.type == "cuda" and (one.index or 0) >= there]
    if gone:
        yield problem(f"{', '.join(gone)}: this host has {there} GPUs")
    twice = sorted({str(one) for one in devices if one.type == "cuda" and devices.count(one) > 1})
    if twice:
        yield problem(f"{', '.join(twice)} twice: its replicas would wait for one another")


def _numbered(device: torch.device) -> torch.device:
    """Return a GPU with its number, and the CPU without one, as tensors have them."""
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type == "cuda" and device.index is None:
        index = torch.cuda.current_device() if torch.cuda.is_available() else 0
        return torch.device("cuda", index)
    return device


def require_cut(module: nn.Module, dim: int, whole: Sequence[str]) -> None:
    """Raise ConfigError where `dim` is no dim, or `whole` names no arguments of the forward."""
    if not isinstance(dim, int) or isinstance(dim, bool) or dim < 0:
        raise _refused("dim", f"dim = {dim!r}, and dims are counted from 0", "dim=0", "dim=1")
    if isinstance(whole, str):
        raise _refused("whole", f"whole = {whole!r} is no list of names", f"whole=[{whole!r}]")
    known = inspect.signature(module.forward).parameters
    if any(one.kind is one.VAR_KEYWORD for one in known.values()):
        return
    names = [name for name, one in known.items() if one.kind is not one.VAR_POSITIONAL]
    for name in whole:
        if name not in names:
            near = did_you_mean(name, names) or names
            message = (
                f"whole names {name!r}, which is no argument of {type(module).__name__}.forward"
            )
            raise _refused("whole", message, *near)


def _refused(key: str, message: str, *ways: str) -> ConfigError:
    return ConfigError([THREADED_ARGUMENT.problem(message, key=key, suggestions=ways)])
