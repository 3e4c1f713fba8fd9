# SPDX-License-Identifier: Apache-2.0
"""Tokens on their way to experts and back, padded: every rank sends every other as many rows.

Split: as `token_dispatcher.py` says.
Sent:  for each expert on another rank so many slots, full or not (all-to-all of equal parts): rows
       and gates there, outputs back; in backward the transposes of both. No counts.
Bytes: `padded_dispatch_bytes` in `cost/bytes/expert_sent.py`.
Must divide: what `token_dispatcher.py` says; each expert has a capacity.
Source: Lepikhin et al., "GShard", 2020, section 2.2.

A rank has P slots for each expert, so E x P of all: (ep - 1) / ep of them leave. A motion of rows
sends (ep - 1) x E / ep x P x D elements, one of gates (dispatch, and its backward) as many without
the D. An empty slot is a row of zeros with a gate of zero, so that it adds nothing to any gradient,
and what comes back in it is not read. All shapes follow from the plan: nothing here makes the host
wait for the routing.

Shape suffixes: n tokens of this rank, K experts of a token, E experts, S = n x K assignments, P
slots of all experts on this rank, R rows that arrive, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from echelon.parallel.expert.router import TokenRouting
from echelon.parallel.expert.token_dispatcher import AwaitRows, Transfer, start_both
from echelon.parallel.kernels.expert_kernels import row_sums
from echelon.parallel.transport.collectives import Group, Pending


class PaddedTokenDispatcher:
    """Send each expert the same number of rows, whatever the routing."""

    def __init__(self, routed: TokenRouting, num_experts: int, group: Group, slots: int) -> None:
        """Give each assignment one of the `slots` of its expert; of one expert in their order."""
        self._group, self._num_slots = group, num_experts * slots
        self._top_k = routed.chosen_nK.shape[1]
        self._cut = (num_experts // group.size, slots)
        self.rows_by_expert: Sequence[int] = [group.size * slots] * (num_experts // group.size)
        experts_S = routed.chosen_nK.reshape(-1)
        if routed.kept_nK is not None:
            experts_S = experts_S.masked_fill(~routed.kept_nK.reshape(-1), num_experts)
        by_expert = experts_S.sort(stable=True)
        # Where the assignments of each expert begin; what is dropped comes last, after all of them.
        every = torch.arange(num_experts + 1, device=experts_S.device)
        first_S = torch.searchsorted(by_expert.values, every)[by_expert.values]
        number_S = torch.arange(len(experts_S), device=experts_S.device)
        slot_S = by_expert.values * slots + number_S - first_S
        self._slot_nK = torch.empty_like(slot_S)
        self._slot_nK[by_expert.indices] = slot_S.clamp(max=self._num_slots)
        # One slot more than there are: that of all that is dropped.
        taken_by = torch.full((self._num_slots + 1,), -1, device=experts_S.device)
        taken_by[self._slot_nK] = number_S
        self._slot_nK = self._slot_nK.view_as(routed.chosen_nK)
        self._from_P = taken_by[:-1].clamp(min=0)
        self._empty_P = taken_by[:-1] < 0

    def dispatch(
        self, x_nD: torch.Tensor, gates_nK: torch.Tensor | None, *, name: str
    ) -> AwaitRows:
        """Start to copy tokens to the slots of their experts."""
        rows_PD = x_nD.index_select(0, self._from_P // self._top_k)
        rows_PD.masked_fill_(self._empty_P[:, None], 0)
        gates_P = None
        if gates_nK is not None:
            gates_P = gates_nK.reshape(-1).index_select(0, self._from_P)
            gates_P.masked_fill_(self._empty_P, 0)
        return start_both(self._to_experts, rows_PD, gates_P, name)

    def combine(
        self, rows_RD: torch.Tensor, gates_R: torch.Tensor | None, *, name: str
    ) -> AwaitRows:
        """Start to add up the rows of full slots for each token."""
        back = start_both(self._from_experts, rows_RD, gates_R, name)

        def arrive() -> tuple[torch.Tensor, torch.Tensor | None]:
            rows, gates = back()
            slot_S, each = self._slot_nK.view(-1), self._slot_nK.shape[1]
            starts_n = torch.arange(0, len(slot_S), each, device=slot_S.device)
            x_nD = row_sums(rows, slot_S, starts_n)
            return x_nD, None if gates is None else gates[self._slot_nK]

        return arrive

    def _to_experts(self, slots_P: torch.Tensor, name: str) -> Transfer:
        received, sent = self._exchange(slots_P, name)
        return partial(self._by_expert, received), sent

    def _from_experts(self, rows: torch.Tensor, name: str) -> Transfer:
        received, sent = self._exchange(self._by_rank(rows), name)
        return (lambda: received), sent

    def _exchange(self, slots_P: torch.Tensor, name: str) -> tuple[torch.Tensor, Pending]:
        """Start to send the slots of each rank to it; return those that come, and one of zero."""
        received = slots_P.new_empty((self._num_slots + 1, *slots_P.shape[1:]))
        received[-1] = 0
        return received, self._group.all_to_all(received[:-1], slots_P, name=name, async_op=True)

    def _by_expert(self, slots: torch.Tensor) -> torch.Tensor:
        """Return what came from each rank, sorted by expert, then by rank."""
        cut = slots[:-1].unflatten(0, (self._group.size, *self._cut))
        return cut.transpose(0, 1).flatten(0, 2)

    def _by_rank(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows that are sorted by expert sorted by rank, then by expert."""
        experts, slots = self._cut
        cut = rows.unflatten(0, (experts, self._group.size, slots))
        return cut.transpose(0, 1).flatten(0, 2).contiguous()
