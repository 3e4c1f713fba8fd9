"""What ranks send inside of nodes and between them: every message is counted as it leaves."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch

from echelon.core.choices.collective_algorithms import BACKEND
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from echelon.parallel.transport import collectives
from echelon.parallel.transport.collectives import Group
from echelon.parallel.transport.messages import GlooPeers
from echelon.proof.oracle.batches import global_batch
from echelon.training.subject import build

Tiers = tuple[int, int]


def tiers_of_step(context: RankContext, plan_json: str) -> Tiers:
    """Return what one rank sends in its second step: inside of its node, and to others.

    Of collectives. Sums that are left to the library count as the library's algorithm sends them.
    Exchanges count where no rows go to experts, whose numbers no formula knows.
    """
    plan = Plan.from_json(plan_json)
    node, sent = plan.cluster.devices_per_node, Counter[bool]()
    send, start = GlooPeers.send, Group._start_sum
    lock, exchanging = threading.Lock(), set[threading.Thread]()

    def counted(peers: GlooPeers, tensor: torch.Tensor, member: int) -> Any:
        far = peers.ranks[member] // node != context.rank // node
        if threading.current_thread() not in exchanging:
            with lock:
                sent[far] += tensor.nbytes
        return send(peers, tensor, member)

    def by_the_library(group: Group, tensor: torch.Tensor) -> Any:
        sums = group._sums
        if sums is not None and sums.algorithm == BACKEND:
            for far, count in enumerate(sums.bytes_by_tier(tensor.numel(), tensor.element_size())):
                with lock:
                    sent[bool(far)] += count
        return start(group, tensor)

    def not_counted(sends: Any, receives: Any, peers: GlooPeers) -> Any:
        # The threads of communicators send what counts at the same time.
        exchanging.add(threading.current_thread())
        try:
            return exchange(sends, receives, peers)
        finally:
            exchanging.clear()

    exchange = collectives.start_gloo_exchange
    subject: Any = build(context, plan)
    try:
        subject.step(global_batch(plan, 0), 0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GlooPeers, "send", counted)
            patch.setattr(Group, "_start_sum", by_the_library)
            if plan.model.experts is not None:
                patch.setattr(collectives, "start_gloo_exchange", not_counted)
            subject.step(global_batch(plan, 1), 1)
        return sent[False], sent[True]
    finally:
        subject.close()


def tiers_run(plan: Plan, pool: RankPool) -> list[Tiers]:
    """Return the tiers of each rank of a plan."""
    target = f"{__name__}:{tiers_of_step.__name__}"
    return pool.run(target, plan.to_json(), plan.mesh.world_size)
