# SPDX-License-Identifier: Apache-2.0
"""What all ranks must agree on before the first step; the odd one is named.

Rank 0 reads what every rank says and answers all of them, so a run of n ranks costs n reads.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta

import torch

from echelon.core.errors import EnvironmentProblem, Problem
from echelon.core.rulebook.launch import (
    RANK_NEVER_JOINED,
    SAME_CODE,
    SAME_CONFIG,
    SAME_STATE,
    SAME_TORCH,
)
from echelon.core.rules import Rule
from echelon.core.serialize import content_hash
from echelon.core.version import __version__, source_hash
from echelon.launch.context import RankContext
from echelon.launch.process_group import Store
from echelon.launch.root_cause import rank_name

_CODE, _TORCH, _CONFIG = "code", "torch", "config"
_FACTS: Mapping[str, tuple[Rule, str]] = {
    _CODE: (SAME_CODE, "Echelon"),
    _TORCH: (SAME_TORCH, "torch"),
    _CONFIG: (SAME_CONFIG, "a run configuration with hash"),
}
_STATE_S = 60.0
_VERDICT_S = 5.0
_MOST_NAMED = 8  # ranks in a message


def check_same_start(
    store: Store, *, rank: int, labels: tuple[str, ...], argument: object, timeout_s: float
) -> None:
    """Compare code, torch and configuration over all ranks; EnvironmentProblem names the odd.

    A rank that does not take part within `timeout_s` is named as well.
    """
    facts = {_CODE: code_version(), _TORCH: str(torch.__version__), _CONFIG: content_hash(argument)}
    _agree(store, "hello", rank, labels, facts, timeout_s)


def check_same_state(
    context: RankContext, digests: Mapping[str, str], labels: tuple[str, ...]
) -> None:
    """Compare `digests` over the ranks that have the same keys: replicas hold equal values.

    A key names what is replicated (a tensor, or all tensors of one model-parallel place); a rank
    leaves out what it does not hold. EnvironmentProblem names the odd rank. Every rank calls this.
    """
    _agree(context.store, "state", context.rank, labels, digests, _STATE_S)


def code_version() -> str:
    """Return the version and a hash over the source files of the installed package."""
    return f"{__version__}+{source_hash()[:12]}"


def disagreements(
    said: Mapping[int, Mapping[str, str]], labels: tuple[str, ...]
) -> tuple[Problem, ...]:
    """Return one problem per key on which ranks differ; the majority is taken to be right."""
    problems: list[Problem] = []
    for key in dict.fromkeys(key for facts in said.values() for key in facts):
        values = {rank: facts[key] for rank, facts in said.items() if key in facts}
        counts = Counter(values.values())
        if len(counts) == 1:
            continue
        rule, what = _FACTS.get(key, (SAME_STATE, f"{key} ="))
        (common, most), (_, second) = counts.most_common(2)
        odd = [rank for rank, value in values.items() if value != common]
        parts = [f"{_who(r, labels)} has {what} {values[r]}" for r in odd[:_MOST_NAMED]]
        if len(odd) > _MOST_NAMED:
            parts.append(f"{len(odd) - _MOST_NAMED} more differ")
        even = ", no majority" if most == second else ""
        holder = next(rank for rank, value in values.items() if value == common)
        rest = _who(holder, labels) if most == 1 else f"{most} ranks"
        parts.append(f"{rest}: {common}{even}")
        problems.append(rule.problem("; ".join(parts)))
    return tuple(problems)


def _agree(
    store: Store,
    topic: str,
    rank: int,
    labels: tuple[str, ...],
    facts: Mapping[str, str],
    timeout_s: float,
) -> None:
    count = store.add(f"{topic}/round/{rank}", 1)
    place = f"{topic}/{count}"
    store.set(f"{place}/{rank}", json.dumps(dict(facts)))
    if rank == 0:
        problems = _judge(store, place, labels, timeout_s)
        store.set(f"{place}/verdict", json.dumps([problem.to_json() for problem in problems]))
    else:
        problems = _verdict(store, place, labels, timeout_s + _VERDICT_S)
    if problems:
        raise EnvironmentProblem(problems)


def _judge(
    store: Store, place: str, labels: tuple[str, ...], timeout_s: float
) -> tuple[Problem, ...]:
    world = range(len(labels))
    deadline = time.monotonic() + timeout_s
    missing = [rank for rank in world if not _arrives(store, f"{place}/{rank}", deadline)]
    if missing:
        names = ", ".join(_who(rank, labels) for rank in missing[:_MOST_NAMED])
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        return (
            RANK_NEVER_JOINED.problem(
                f"{names}{more} did not join within {timeout_s:g} s; "
                f"{len(labels) - len(missing)} of {len(labels)} ranks did"
            ),
        )
    return disagreements({rank: json.loads(store.get(f"{place}/{rank}")) for rank in world}, labels)


def _verdict(
    store: Store, place: str, labels: tuple[str, ...], timeout_s: float
) -> tuple[Problem, ...]:
    key = f"{place}/verdict"
    if not _arrives(store, key, time.monotonic() + timeout_s):
        return (
            RANK_NEVER_JOINED.problem(f"{_who(0, labels)} did not join within {timeout_s:g} s"),
        )
    entries = json.loads(store.get(key))
    return tuple(Problem(suggestions=tuple(entry.pop("works")), **entry) for entry in entries)


def _arrives(store: Store, key: str, deadline: float) -> bool:
    left = deadline - time.monotonic()
    if left <= 0:
        return store.check([key])
    try:
        store.wait([key], timedelta(seconds=left))
    except RuntimeError:
        return store.check([key])
    return True


def _who(rank: int, labels: tuple[str, ...]) -> str:
    return rank_name(rank, labels[rank])
