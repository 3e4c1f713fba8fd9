"""What four ranks do with tokens and experts: who is sent where, and what comes back.

The first value of a token is its number, and an expert adds to it where it was: so a message tells
which tokens it carries, on their way there and back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from echelon.core.model_shape import Experts
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from echelon.parallel.expert import layer
from echelon.parallel.transport.collectives import Group, Pending
from tests.parallel.expert.targets import (
    Stream,
    mixture_of,
    mixture_plan,
    note_routes,
    own_batch,
    rows_of,
    stream_of,
)
from tests.parallel.targets import build

RANKS = 4
TOP = {"1 expert a token": 1, "2 experts a token": 2}

Note = dict[str, Any]
_VISITED = 100.0
"""What an expert adds to the first value of a token, times one more than its number."""


def travel_case(top_k: int) -> Plan:
    """Return a plan of one block with four experts over four ranks, two tokens on each."""
    experts = Experts(num_experts=RANKS, top_k=top_k, ffn=12)
    return mixture_plan(
        experts=experts, dp_shard=RANKS, ep=RANKS, sequence_length=2, microbatch_sequences=1
    )


def record_travel(pool: RankPool) -> Note:
    """Return what ranks note, by the number of experts of a token."""
    found: Note = {"ranks": RANKS, "cases": {}}
    for name, top_k in TOP.items():
        plan = travel_case(top_k)
        notes = pool.run(route_and_note, (plan, _numbered(plan)), world_size=RANKS)
        found["cases"][name] = {"hidden": plan.model.hidden, "ranks": list(notes)}
    return found


def _numbered(plan: Plan) -> Stream:
    """Return random tokens that carry their numbers."""
    stream = stream_of(plan)
    x_ND = stream.x_ND.clone()
    x_ND[:, 0] = torch.arange(len(x_ND), dtype=x_ND.dtype)
    return replace(stream, x_ND=x_ND)


def route_and_note(context: RankContext, argument: tuple[Plan, Stream]) -> Note:
    """Route this rank's tokens through the experts, which say that they were there."""
    plan, stream = argument
    built = build(context, plan)
    batch = own_batch(built, plan)
    rows = rows_of(built, plan, batch)
    mixture, experts = mixture_of(built)
    with torch.no_grad():
        # The number of a token takes no part in the choice of its experts.
        mixture.router.weight[:, 0] = 0
    routes = note_routes(experts.router)
    sent: list[Note] = []
    arrived: list[int] = []
    with _noting_messages(sent), _marking(context.rank, arrived), torch.no_grad():
        mixture(stream.x_ND[rows], batch)
    _, routed = routes[-1]
    return {
        "tokens": rows.tolist(),
        "chosen": routed.chosen_nK.tolist(),
        "sent": sent,
        "arrived": arrived,
    }


@contextmanager
def _noting_messages(into: list[Note]) -> Iterator[None]:
    exchange = Group.exchange

    def noted(
        group: Group,
        sends: Mapping[int, torch.Tensor],
        receives: Mapping[int, torch.Tensor],
        *,
        name: str,
    ) -> Pending:
        for place, tensor in sends.items():
            if tensor.dim() == 2:  # gates go beside the rows
                tokens = (tensor[:, 0] % _VISITED).long().tolist()
                visits = (tensor[:, 0] // _VISITED).long().tolist()
                into.append(
                    {
                        "name": name,
                        "to": group.ranks[place],
                        "tokens": tokens,
                        "visited": [one - 1 for one in visits if one],
                        "bytes": tensor.nbytes,
                    }
                )
        return exchange(group, sends, receives, name=name)

    with patch.object(Group, "exchange", noted):
        yield


@contextmanager
def _marking(expert: int, arrived: list[int]) -> Iterator[None]:
    """Note the tokens that come to the expert of this rank, and let its outputs say so."""
    compute = layer.ExpertFeedForward

    def marked(rows_RD: torch.Tensor, *rest: Any) -> torch.Tensor:
        arrived.extend(rows_RD[:, 0].long().tolist())
        y_RD = compute.apply(rows_RD, *rest)
        y_RD[:, 0] = rows_RD[:, 0] + _VISITED * (expert + 1)
        return y_RD

    with patch.object(layer, "ExpertFeedForward", SimpleNamespace(apply=marked)):
        yield
