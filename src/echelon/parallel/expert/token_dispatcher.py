# SPDX-License-Identifier: Apache-2.0
"""Tokens on their way to experts and back: straight to their ranks, in two hops, or padded.

Straight to the ranks of their experts (the five lines of the others stand at their classes):

Split: the experts, `num_experts / ep` on each rank of the expert group.
Sent:  the counts for each expert (all-to-all), then each token once for each of its experts on
       other ranks, with its gate (uneven all-to-all); the outputs back the same way; in backward
       the transposes of both.
Bytes: `flat_dispatch_bytes` in `cost/bytes/expert_sent.py`.
Must divide: ep | num_experts; ep | dp_shard x cp (x tp where experts are whole).
Source: Lepikhin et al., "GShard", 2020; Rajbhandari et al., "DeepSpeed-MoE", 2022, section 5.

A dispatcher has two motions, each the transpose of the other: `dispatch` copies rows of tokens to
the experts, `combine` adds up what experts made of them, token by token. So forward is dispatch,
experts, combine, and so is backward. Assignments are sorted by expert once; what arrives is
arranged so that the rows of an expert lie side by side, in the order of the ranks that they come
from.

Alone (ep = 1) nothing is sent, so sizes need not be known: where experts take rows that only the
device counts (`grouped_matmul.py`), all assignments are rows then, those that are dropped behind
the last expert.

Shape suffixes: n tokens of this rank, K experts of a token, S assignments that leave, R rows that
arrive, D hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from echelon.models.moe import counts_of
from echelon.parallel.expert.grouped_matmul import RowCounts, ends_of
from echelon.parallel.expert.router import TokenRouting
from echelon.parallel.kernels.expert_kernels import row_sums
from echelon.parallel.transport.collectives import Group, Pending

AwaitRows = Callable[[], tuple[torch.Tensor, torch.Tensor | None]]
"""Wait for rows, and for the number that goes with each where there is one."""


ROWS_OF_EXPERTS = "the rows of experts"
"""What the host reads where sizes follow from the routing."""

Transfer = tuple[Callable[[], torch.Tensor], Pending]
"""What arranges the rows that come, once the other is awaited."""


def start_both(
    start: Callable[[torch.Tensor, str], Transfer],
    rows: torch.Tensor,
    gates: torch.Tensor | None,
    name: str,
) -> AwaitRows:
    """Start a motion of rows, and the same of the gates that go with them, where there are any."""
    rows_there, rows_sent = start(rows, name)
    gates_there, gates_sent = None, Pending()
    if gates is not None:
        gates_there, gates_sent = start(gates, f"{name}.gates")

    def arrive() -> tuple[torch.Tensor, torch.Tensor | None]:
        rows_sent.wait()
        gates_sent.wait()
        return rows_there(), None if gates_there is None else gates_there()

    return arrive


class SortedAssignments:
    """The assignments of tokens in the order of their experts: `slot_S` is token x K + place.

    How many of them are kept only the device knows; until the host does (`keep`), there are none.
    """

    def __init__(self, routed: TokenRouting, num_experts: int) -> None:
        """Sort the assignments, what is dropped last."""
        self.num_tokens, self.top_k = routed.chosen_nK.shape
        self._num_experts = num_experts
        experts_S = routed.chosen_nK.reshape(-1)
        self._kept_nK = routed.kept_nK
        if self._kept_nK is not None:
            experts_S = experts_S.masked_fill(~self._kept_nK.reshape(-1), num_experts)
        self._experts_S, self.slot_S = experts_S.sort(stable=True)
        self.dropped_S: torch.Tensor | None = None

    def counts(self) -> torch.Tensor:
        """Return how many rows each expert gets, int64 [E]."""
        size = self._num_experts
        if self._kept_nK is None:
            return counts_of(self._experts_S, size)
        return counts_of(self._experts_S, size + 1)[:size].clone()

    def keep_all(self) -> torch.Tensor:
        """Take all assignments for rows; return where those of each expert end, int32 [E].

        Behind the last end is what is dropped: `dropped_S`, if there may be any.
        """
        ends_E = ends_of(self._experts_S, self._num_experts)
        if self._kept_nK is not None:
            self.dropped_S = self._experts_S == self._num_experts
            self._kept_nK = None
        self.keep(len(self.slot_S))
        return ends_E

    def keep(self, count: int) -> None:
        """Learn that `count` assignments are kept, and find the rows of each token once."""
        if count < len(self.slot_S):
            self.slot_S = self.slot_S[:count].clone()  # not a part of what else would be kept
        self.token_S = self.slot_S // self.top_k
        self._order_S = self.slot_S.argsort()
        if self._kept_nK is None:
            ends_n = torch.arange(1, self.num_tokens + 1, device=self.slot_S.device) * self.top_k
            self._starts_n = ends_n - self.top_k
        else:
            counts_n = self._kept_nK.sum(1)
            self._starts_n = counts_n.cumsum(0) - counts_n
        self._kept_nK = None
        del self._experts_S

    def without_dropped(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows, or numbers that go with them, with zeros for what is dropped."""
        if self.dropped_S is None:
            return rows
        dropped = self.dropped_S if rows.dim() == 1 else self.dropped_S[:, None]
        return rows.masked_fill(dropped, 0)

    def add_up(self, rows_SD: torch.Tensor) -> torch.Tensor:
        """Return x_nD, the sums of the rows of each token; one without rows gets zeros."""
        if not len(rows_SD):
            return rows_SD.new_zeros((len(self._starts_n), rows_SD.shape[1]))
        rows_SD = self.without_dropped(rows_SD)
        return row_sums(rows_SD, self._order_S, self._starts_n)


class FlatTokenDispatcher:
    """Send each assignment straight to the rank of its expert."""

    def __init__(
        self,
        routed: TokenRouting,
        num_experts: int,
        group: Group,
        *,
        even_rows: int | None = None,
        counted_by_host: bool = True,
    ) -> None:
        """Tell the others how many rows they get; every rank of the group does so together.

        `even_rows` are what this rank would keep in all, where the routing has no elements: by
        default all assignments. Who is alone need not count (`counted_by_host`).
        """
        self._group = group
        self._sorted = SortedAssignments(routed, num_experts)
        self.rows_by_expert: RowCounts
        if group.size == 1 and not counted_by_host:
            self.rows_by_expert = self._sorted.keep_all()
            return
        leaving = self._sorted.counts().view(group.size, -1)
        arriving = torch.empty_like(leaving)
        group.all_to_all(arriving, leaving, name="experts.counts").wait()
        # The sizes of what follows: on a GPU the host waits for them here, and nowhere else.
        with group.recorder.reading(ROWS_OF_EXPERTS):
            both = torch.stack([leaving, arriving]).cpu()
        if routed.chosen_nK.is_meta:
            rows = routed.chosen_nK.numel() if even_rows is None else even_rows
            both = even_counts(rows, num_experts, group)
        self._num_sent: list[int] = both[0].sum(1).tolist()
        self._num_received: list[list[int]] = both[1].tolist()
        self.rows_by_expert = both[1].sum(0).tolist()
        self._sorted.keep(sum(self._num_sent))

    def dispatch(
        self, x_nD: torch.Tensor, gates_nK: torch.Tensor | None, *, name: str
    ) -> AwaitRows:
        """Start to copy tokens to their experts."""
        rows_SD = x_nD.index_select(0, self._sorted.token_S)
        gates_S = None
        if gates_nK is not None:
            gates_S = gates_nK.reshape(-1).index_select(0, self._sorted.slot_S)
        if self._group.size == 1:
            return lambda: (rows_SD, gates_S)
        return start_both(self._to_experts, rows_SD, gates_S, name)

    def combine(
        self, rows_RD: torch.Tensor, gates_R: torch.Tensor | None, *, name: str
    ) -> AwaitRows:
        """Start to add up rows for each token."""
        if self._group.size == 1:
            return lambda: self._added_up(rows_RD, gates_R)
        back = start_both(self._from_experts, rows_RD, gates_R, name)
        return lambda: self._added_up(*back())

    def _to_experts(self, parts: torch.Tensor, name: str) -> Transfer:
        arriving = [sum(counts) for counts in self._num_received]
        pieces, sent = self._all_to_all(parts, self._num_sent, arriving, name)
        return partial(self._by_expert, pieces), sent

    def _from_experts(self, parts: torch.Tensor, name: str) -> Transfer:
        leaving = [sum(counts) for counts in self._num_received]
        pieces, sent = self._all_to_all(self._by_rank(parts), leaving, self._num_sent, name)
        return partial(torch.cat, pieces), sent

    def _added_up(
        self, rows_SD: torch.Tensor, gates_S: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        gates_nK = None
        if gates_S is not None:
            shape = (self._sorted.num_tokens, self._sorted.top_k)
            gates_nK = gates_S.new_zeros(shape)
            gates_nK.view(-1)[self._sorted.slot_S] = self._sorted.without_dropped(gates_S)
        return self._sorted.add_up(rows_SD), gates_nK

    def _all_to_all(
        self, parts: torch.Tensor, sizes: Sequence[int], others: Sequence[int], name: str
    ) -> tuple[list[torch.Tensor], Pending]:
        """Start to send the parts (of `sizes` rows) to the members; return what comes from each."""
        leaving, me = parts.split(list(sizes)), self._group.index
        received = [
            leaving[me] if place == me else parts.new_empty((count, *parts.shape[1:]))
            for place, count in enumerate(others)
        ]
        sends = {p: one for p, one in enumerate(leaving) if p != me and len(one)}
        receives = {p: one for p, one in enumerate(received) if p != me and len(one)}
        return received, self._group.exchange(sends, receives, name=name)

    def _by_expert(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return what came from each rank, sorted by expert, then by rank."""
        pieces = [
            part.split(counts) for part, counts in zip(parts, self._num_received, strict=True)
        ]
        return torch.cat([rows for of_expert in zip(*pieces, strict=True) for rows in of_expert])

    def _by_rank(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows that are sorted by expert sorted by rank, then by expert."""
        ranks, experts = range(len(self._num_received)), range(len(self._num_received[0]))
        pieces = rows.split([self._num_received[r][e] for e in experts for r in ranks])
        return torch.cat([pieces[e * len(ranks) + r] for r in ranks for e in experts])


def even_counts(num_rows: int, num_experts: int, group: Group) -> torch.Tensor:
    """Return what leaves and what arrives, [2, ranks, experts of one], if all get as many rows.

    Rows that are left over go to the next ranks of the group, one each, so that what a rank sends
    and gets is the same for all: that of `balanced_rows` in `layout/expert_load.py`.
    """
    each, more = divmod(num_rows, group.size)
    here = num_experts // group.size
    found = torch.zeros((2, group.size, here), dtype=torch.int64, device="cpu")
    for place in range(group.size):
        steps = (place - group.index) % group.size, (group.index - place) % group.size
        for way, step in enumerate(steps):
            rows, beyond = divmod(each + (1 <= step <= more), here)
            found[way, place] = rows
            found[way, place, :beyond] += 1
    return found


class TwoHopTokenDispatcher:
    """Send each token once to each node that it reaches, and from there to its experts.

    Split: as above; the ranks of an expert group lie on M nodes, ep / M on each.
    Sent:  across nodes, to the rank with the same place on each node that has experts of a token:
           the token, its gates and its choices. Within a node: a flat dispatch of the tokens that
           crossed. Back the same way: the outputs of the experts of a node are added up for each
           token, and the sum crosses.
    Bytes: `two_hop_dispatch_bytes` in `cost/bytes/expert_sent.py`.
    Must divide: as above; a group has as many ranks on each of its nodes.
    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2.2; DeepEP.

    Each hop is a flat dispatch: the first one of whole nodes, the second one of the experts of a
    node. A pair is a token and a node, other than its own, where one of its experts has room for
    it. With p pairs a rank sends over "ep_across", for each microbatch, layer and chunk:

      experts.counts            8 bytes to each of the M - 1 other nodes: how many pairs it gets
      experts.choices           p x K numbers of 4 bytes: all choices of the token; -1 for no room
      experts.dispatch          p x D elements;  .gates  p x K: all gates of the token
      experts.combine           q x D, for the q pairs that other nodes sent here
      experts.combine.backward  p x D
      experts.dispatch.backward q x D;  .gates  q x K: their gradients, zero but for this node's

    and over "ep_within" the bytes of a flat dispatch over a group of ep / M ranks with E / M
    experts, for all tokens that are at this rank after the first hop, its own and those of the q
    pairs: one row for each assignment to another rank of the node, not one for each rank.

    The slow hop is the one that overlaps: rows have set out across nodes when `dispatch` and
    `combine` return; the hop within the node is waited for where it is due.

    Shape suffixes: M nodes, Q tokens here after the first hop.
    """

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


class PaddedTokenDispatcher:
    """Send each expert the same number of rows, whatever the routing.

    Split: as above.
    Sent:  for each expert on another rank so many slots, full or not (all-to-all of equal parts):
           rows and gates there, outputs back; in backward the transposes of both. No counts.
    Bytes: `padded_dispatch_bytes` in `cost/bytes/expert_sent.py`.
    Must divide: as above; each expert has a capacity.
    Source: Lepikhin et al., "GShard", 2020, section 2.2.

    A rank has P slots for each expert, so E x P of all: (ep - 1) / ep of them leave. A motion of
    rows sends (ep - 1) x E / ep x P x D elements, one of gates (dispatch, and its backward) as many
    without the D. An empty slot is a row of zeros with a gate of zero, so that it adds nothing to
    any gradient, and the row that comes back in it is not read. All shapes follow from the plan:
    nothing here makes the host wait for the routing.

    Shape suffixes: S = n x K assignments, P slots of all experts on this rank.
    """

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
