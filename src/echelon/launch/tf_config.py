# SPDX-License-Identifier: Apache-2.0
"""TF_CONFIG: the JSON by which TensorFlow's launchers tell each process of its cluster.

    {"cluster": {"chief": ["h0:2222"], "worker": ["h1:2222", "h2:2222"]},
     "task": {"type": "worker", "index": 0}}

The chief is rank 0, workers follow in their order; without a chief worker 0 is the first rank.
Parameter servers ("ps") are the last ranks. Ranks meet at the address of the first one. A rank is
known by its place: those of one host, by the text of its address, are local ranks of it, in the
order of ranks. An evaluator is no rank, and no rank needs to know of it.

Source: TensorFlow, "Multi-worker training with Keras", section on TF_CONFIG. What a platform adds
beside these two tables is left alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from echelon.core.errors import EnvironmentProblem, Problem
from echelon.core.rulebook.launch import TF_CONFIG_FORM, TF_CONFIG_ROLE
from echelon.core.rules import did_you_mean

TF_CONFIG = "TF_CONFIG"

Role = Literal["chief", "worker", "ps", "evaluator"]
CHIEF, WORKER, SERVER, EVALUATOR = "chief", "worker", "ps", "evaluator"
ROLES: Mapping[str, Role] = {
    CHIEF: CHIEF,
    "master": CHIEF,
    WORKER: WORKER,
    SERVER: SERVER,
    EVALUATOR: EVALUATOR,
}
"""What a task may be called, and what it is; TensorFlow 1 called the chief master."""
RANKS: tuple[Role, ...] = (CHIEF, WORKER, SERVER)
"""The roles that are ranks, in the order of ranks."""

ROLE_WAYS = (
    "echelon train, which follows the checkpoints of the ranks in this process",
    "train.validate_every = 100: the ranks that train validate",
    f"unset {TF_CONFIG}",
)
"""What an evaluator can do, and what there is in its place."""
_LARGEST_PORT = 65535  # of TCP
_EXAMPLE = (
    'TF_CONFIG=\'{"cluster": {"worker": ["127.0.0.1:29500", "127.0.0.1:29501"]}, '
    '"task": {"type": "worker", "index": 0}}\''
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TFCluster:
    """Hold a cluster as TF_CONFIG tells it: the addresses of each role, and which task this is."""

    addresses: Mapping[Role, tuple[str, ...]]
    role: Role
    index: int

    @property
    def ranks(self) -> tuple[str, ...]:
        """Return the addresses of the ranks: the chief's, those of the workers, the servers'."""
        return tuple(address for role in RANKS for address in self.addresses.get(role, ()))

    @property
    def rank(self) -> int:
        """Return the rank of this task, which is no evaluator."""
        before = RANKS[: RANKS.index(self.role)]
        return sum(len(self.addresses.get(role, ())) for role in before) + self.index

    @property
    def servers(self) -> int:
        """Return how many of the ranks are parameter servers: the last ones."""
        return len(self.addresses.get(SERVER, ()))

    def on_host_of(self, rank: int) -> list[int]:
        """Return the ranks on the host of `rank`, in their order."""
        hosts = [address.rpartition(":")[0] for address in self.ranks]
        return [other for other, host in enumerate(hosts) if host == hosts[rank]]


def read_tf_config(text: str) -> TFCluster:
    """Return the cluster of a TF_CONFIG; EnvironmentProblem has every problem of it."""
    problems: list[Problem] = []
    table = _json_of(text, problems)
    addresses = _addresses_of(table.get("cluster"), problems) if table is not None else {}
    role, index = _task_of(table.get("task"), problems) if table is not None else (WORKER, 0)
    if not problems:
        problems += _task_problems(addresses, role, index)
    if problems:
        raise EnvironmentProblem(problems)
    return TFCluster(addresses=addresses, role=role, index=index)


def require_rank(cluster: TFCluster) -> None:
    """Raise EnvironmentProblem where a task is an evaluator, which is no rank."""
    if cluster.role == EVALUATOR:
        raise EnvironmentProblem(
            TF_CONFIG_ROLE.problem(
                f"this task is {EVALUATOR} {cluster.index}, which is no rank",
                key=TF_CONFIG,
                suggestions=ROLE_WAYS,
            )
        )


def _problem(message: str) -> Problem:
    return TF_CONFIG_FORM.problem(message, key=TF_CONFIG, suggestions=(_EXAMPLE,))


def _json_of(text: str, problems: list[Problem]) -> Mapping[str, Any] | None:
    try:
        found: Any = json.loads(text)
    except json.JSONDecodeError as error:
        problems.append(_problem(f"{TF_CONFIG} is no JSON: {error}"))
        return None
    if not isinstance(found, dict):
        problems.append(_problem(f"{TF_CONFIG} is no table, but {type(found).__name__}"))
        return None
    return cast("Mapping[str, Any]", found)


def _addresses_of(cluster: object, problems: list[Problem]) -> dict[Role, tuple[str, ...]]:
    """Return the addresses of each role; a table or address that is none is a problem."""
    found: dict[Role, tuple[str, ...]] = {}
    if not isinstance(cluster, dict) or not cluster:
        problems.append(_problem('it has no table "cluster" of addresses by role'))
        return found
    for name, listed in cast("dict[str, object]", cluster).items():
        if name not in ROLES:
            near = did_you_mean(name, ROLES)
            means = f"; did you mean {near[0]!r}?" if near else f": {', '.join(ROLES)} are"
            problems.append(_problem(f'"cluster" has {name!r}, which is no role{means}'))
            continue
        entries = cast("list[object]", listed) if isinstance(listed, list) else []
        if not entries:
            problems.append(_problem(f'"cluster" has no list of addresses for {name!r}'))
        for address in entries:
            if not _is_address(address):
                problems.append(_problem(f"{address!r} of {name!r} is not HOST:PORT"))
        found[ROLES[name]] = found.get(ROLES[name], ()) + tuple(map(str, entries))
    every = [address for those in found.values() for address in those]
    twice = sorted({address for address in every if every.count(address) > 1})
    if twice:
        problems.append(_problem(f"{', '.join(twice)}: two tasks have one address"))
    if len(found.get(CHIEF, ())) > 1:
        problems.append(_problem(f"there are {len(found[CHIEF])} chiefs, where there is one"))
    return found


def _is_address(address: object) -> bool:
    if not isinstance(address, str):
        return False
    host, _, port = address.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) <= _LARGEST_PORT


def _task_of(task: object, problems: list[Problem]) -> tuple[Role, int]:
    entries = cast("dict[str, object]", task) if isinstance(task, dict) else {}
    name, index = entries.get("type"), entries.get("index")
    if not isinstance(name, str) or name not in ROLES:
        problems.append(_problem(f'its "task" has the type {name!r}: one of {", ".join(ROLES)}'))
        name = WORKER
    # Some launchers write the index as text.
    number = int(index) if isinstance(index, str) and index.isdecimal() else index
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        problems.append(_problem(f'its "task" has the index {index!r}: a number from 0'))
        number = 0
    return ROLES[name], number


def _task_problems(
    addresses: Mapping[Role, tuple[str, ...]], role: Role, index: int
) -> Iterator[Problem]:
    """Yield that a task is not one of the cluster's; an evaluator need not be listed."""
    count = len(addresses.get(role, ()))
    if index >= count and not (role == EVALUATOR and count == 0):
        yield _problem(f'its "task" is {role} {index}, and "cluster" has {count} of these')
    if not addresses.get(CHIEF) and not addresses.get(WORKER):
        yield _problem('"cluster" has neither a chief nor a worker')
