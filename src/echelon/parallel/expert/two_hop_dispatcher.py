# SPDX-License-Identifier: Apache-2.0
"""Tokens on their way to experts and back in two hops: each crosses to a node at most once.

Split: as `token_dispatcher.py` says; the ranks of an expert group lie on M nodes, ep / M on each.
Sent:  across nodes, to the rank with the same place on each node that has experts of a token: the
       token, its gates and its choices. Within a node: what `token_dispatcher.py` says, of what
       crossed. Back the same way: what the experts of a node made of a token is added up, then
       crosses.
Bytes: `two_hop_dispatch_bytes` in `cost/bytes/expert_sent.py`.
Must divide: what `token_dispatcher.py` says; a group has as many ranks on each of its nodes.
Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2.2; DeepEP.

Each hop is a flat dispatch: the first one of whole nodes, the second one of the experts of a node.
A pair is a token and a node, other than its own, where one of its experts has room for it. With p
pairs a rank sends over "ep_across", for each microbatch, layer and chunk:

  experts.counts            8 bytes to each of the M - 1 other nodes: how many pairs it gets
  experts.choices           p x K numbers of 4 bytes: all choices of the token; -1 for no room
  experts.dispatch          p x D elements;  .gates  p x K: all gates of the token
  experts.combine           q x D, for the q pairs that other nodes sent here
  experts.combine.backward  p x D
  experts.dispatch.backward q x D;  .gates  q x K: their gradients, zero but for this node's experts

and over "ep_within" what a flat dispatch sends over a group of ep / M ranks with E / M experts, for
all tokens that are at this rank after the first hop, its own and those of the q pairs: one row for
each assignment to another rank of the node, not one for each rank.

The slow hop is the one that overlaps: what leaves has set out across nodes when `dispatch` and
`combine` return; the hop within the node is waited for where it is due.

Shape suffixes: n tokens of this rank, K experts of a token, M nodes, Q tokens here after the first
hop, R rows at experts of this rank, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from echelon.parallel.expert.grouped_matmul import RowCounts
from echelon.parallel.expert.router import TokenRouting
from echelon.parallel.expert.token_dispatcher import (
    AwaitRows,
    FlatTokenDispatcher,
    Transfer,
    start_both,
)
from echelon.parallel.transport.collectives import Group, Pending


class TwoHopTokenDispatcher:
    """Send each token once to each node that it reaches, and from there to its experts."""

    def __init__(
        self,
        routed: TokenRouting,
        num_experts: int,
        across: Group,
        within: Group,
        even: tuple[int, int] | None = None,
    ) -> None:
        """Tell the others what they get; every rank of both groups does so together.

        `even` are the pairs of a token and a node, and the assignments, where the routing has no
        elements: by default as many as there can be.
        """
        here = num_experts // across.size
        choices_nK = routed.chosen_nK.to(torch.int32)
        if routed.kept_nK is not None:
            choices_nK = choices_nK.masked_fill(~routed.kept_nK, -1)
        nodes_M = torch.arange(across.size, device=choices_nK.device)
        reached_nM = (choices_nK[..., None].floor_divide(here) == nodes_M).any(1)
        every_nM = nodes_M.expand(len(choices_nK), -1)
        # At most: each choice of a token on a node of its own.
        num_pairs = len(choices_nK) * min(choices_nK.shape[1], across.size)
        even = even or (num_pairs, routed.chosen_nK.numel())
        self._across = FlatTokenDispatcher(
            _routing(every_nM, reached_nM), across.size, across, even_rows=even[0]
        )
        choices_QK, _ = self._across.dispatch(choices_nK, None, name="experts.choices")()
        experts_QK = choices_QK.long() - across.index * here
        mine_QK = (experts_QK >= 0) & (experts_QK < here)
        chosen = _routing(experts_QK.clamp(0, here - 1), mine_QK)
        self._within = FlatTokenDispatcher(chosen, here, within, even_rows=even[1])
        self.rows_by_expert: RowCounts = self._within.rows_by_expert

    def dispatch(
        self, x_nD: torch.Tensor, gates_nK: torch.Tensor | None, *, name: str
    ) -> AwaitRows:
        """Start to copy tokens to the nodes of their experts; there they go on when awaited."""
        tokens = start_both(partial(_alone, self._across.dispatch), x_nD, gates_nK, name)

        def arrive() -> tuple[torch.Tensor, torch.Tensor | None]:
            return self._within.dispatch(*tokens(), name=name)()

        return arrive

    def combine(
        self, rows_RD: torch.Tensor, gates_R: torch.Tensor | None, *, name: str
    ) -> AwaitRows:
        """Add up rows for each token of this node, and start to add up what nodes made of it."""
        x_QD, gates_QK = self._within.combine(rows_RD, gates_R, name=name)()
        # Of each choice one node has a gradient: the sum over nodes puts them together.
        return start_both(partial(_alone, self._across.combine), x_QD, gates_QK, name)


def _alone(move: Callable[..., AwaitRows], rows: torch.Tensor, name: str) -> Transfer:
    """Start a motion of rows that nothing goes with."""
    rows_there = move(rows, None, name=name)
    return (lambda: rows_there()[0]), Pending()


def _routing(chosen: torch.Tensor, kept: torch.Tensor) -> TokenRouting:
    """Return where tokens go; their gates travel with each motion that has any."""
    return TokenRouting(gates_nK=torch.empty(0), chosen_nK=chosen, kept_nK=kept)
