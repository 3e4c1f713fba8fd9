# SPDX-License-Identifier: Apache-2.0
"""Rounds of local SGD on one rank: what islands agreed on, what they send, when they take it over.

Split: the samples; between two rounds each island is a training of its own.
Sent:  per round, one all-reduce over `dp_replicate` of each run of a fragment in a rank's slices:
       what the island moved away from the outer parameters.
Bytes: `outer_bytes` in `cost/bytes/local_sgd.py`, 1/H of those of gradients in a mean step.
Must divide: nothing.
Source: Stich, 2018; Douillard et al., "DiLoCo", 2023, algorithm 1; "Streaming DiLoCo", 2025.

With the mean d of what islands moved away from the outer parameters p, of rate r and momentum u:

    sgd       p = p - r d                          Stich (r = 1: the mean of islands)
    nesterov  m = u m + d;  p = p - r (d + u m)    Douillard et al., section 2

as `torch.optim.SGD` writes them, without dampening. Outer parameters and momentum are slices as
those of the inner optimizer are, the same on all islands: one that is lost takes nothing with it.
Without delay two buckets are under way at a time; with it outer gradients have a memory of their
own, in which they are summed while islands go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from echelon.core.choices.local_sgd import LocalSgd
from echelon.layout.islands import blocks_in_stage, fragment_of, fragment_ranges
from echelon.layout.slots import SlotRange
from echelon.models.precision import TORCH_DTYPES
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.storage.weights import bucket_shards
from echelon.parallel.transport.collectives import Pending
from echelon.training.local_sgd.checkpoint import IslandCheckpoint
from echelon.training.local_sgd.quantised import QuantisedGradients
from echelon.training.steps.part import NamedShards, ShardsByKind, StepPart, StepPlace, StepResult

PARAMETERS, MOMENTUM, GRADIENTS = "outer.parameters", "outer.momentum", "outer.gradients"
"""Kinds of outer state, as a checkpoint names them."""

MAX_IN_FLIGHT = 2
"""Buckets that are summed at a time, where the next step waits for their end."""

Flats = Mapping[str, torch.Tensor]
"""A slice of each bucket, by its name."""


class OuterSteps(StepPart):
    """Take the outer steps of one rank's slices."""

    def __init__(self, place: StepPlace) -> None:
        """Reserve the outer state of a rank of a run that has islands.

        Where the optimizer has no master copies, it updates the parameters themselves.
        """
        plan, groups, device, masters = place.run, place.groups, place.device, place.masters
        buckets = place.model.buckets
        local = plan.mathematics.local_sgd
        self._local, self._islands, self._buckets = local, groups.islands, buckets
        self._groups = groups
        self._device, self._dtype = device, TORCH_DTYPES[plan.mathematics.precision.master]
        self._quantised: QuantisedGradients | None = None
        if local.quantised:
            rank = groups.recorder.rank
            blocks = [blocks_in_stage(plan, rank, f) for f in range(local.fragments)]
            self._quantised = QuantisedGradients(local, buckets, groups, blocks)
        self._values = {one.name: masters.get(one.name, one.value_slice) for one in buckets}
        self._runs = {one.name: _fragment_runs(local, one) for one in self._buckets}
        self._fragments = {
            one.name: {fragment_of(local, slot.spec) for slot in one.slots} for one in buckets
        }
        self._parameters = {name: _wide(values) for name, values in self._values.items()}
        nesterov, late = local.outer == "nesterov", local.delay > 0
        self._momentum = {n: torch.zeros_like(p) for n, p in self._parameters.items() if nesterov}
        self._gradients = {n: torch.zeros_like(p) for n, p in self._parameters.items() if late}
        self._pending: dict[tuple[str, int], list[Pending]] = {}
        self.checkpoint = IslandCheckpoint(groups, self._shards, self.take_back)
        self.start_from_weights()

    def start_from_weights(self) -> None:
        """Agree on the values that all islands begin with."""
        for name, values in self._values.items():
            self._parameters[name].copy_(values)

    def take_back(self) -> None:
        """Let this island go on from the parameters that all of them agree on."""
        for name, values in self._values.items():
            values.copy_(self._parameters[name])

    def held_back(self, step: int) -> Collection[str]:
        """Buckets of which the end of `step` reads or changes some slice.

        All ranks that have slices of a bucket agree on it; its slices are sent to them afterwards.
        """
        local = self._local
        touched = {*local.meets_after(step), *local.changes_after(step)}
        return {name for name, mine in self._fragments.items() if not mine.isdisjoint(touched)}

    def ends_round(self, step: int) -> bool:
        """Return whether a round is over with `step`."""
        return self._local.ends_round(step)

    def stop_requests(self, step: int, asked: int) -> int:
        """Return how many ranks of all islands ask to stop; 0 where no round ends with `step`.

        `asked` are those of this island: it goes on until all of them can stop together.
        """
        if not self._local.ends_round(step):
            return 0
        row = torch.full((1,), asked, dtype=torch.int64, device=self._device)
        rows = self._islands.gather_rows(row, name="round")
        with self._islands.recorder.reading("who asks to stop"):
            return int(rows.sum())

    def mean_loss(self, loss: float, tokens: int) -> float:
        """Return the mean over the tokens of all islands; `loss` is that over those of this one."""
        row = torch.tensor([loss * tokens, tokens], dtype=torch.float64, device=self._device)
        total, count = self._islands.gather_rows(row, name="loss").sum(0).tolist()
        return total / max(1.0, count)

    def agreed(self, result: StepResult, rows: torch.Tensor) -> StepResult:
        """Result with the requests to stop of all islands."""
        asked = self.stop_requests(result.step - 1, result.stop_requests)
        return replace(result, stop_requests=asked)

    def facts(self, result: StepResult) -> StepResult:
        """Tokens of all islands: data has about as many in each."""
        return replace(result, tokens=result.tokens * self._islands.size)

    @torch.no_grad()
    def after_update(self, step: int, *, skipped: bool) -> list[Bucket]:
        """Meet and take outer steps, as the end of `step` asks for.

        Return the buckets with something new: all that it touches, or of a step that is `skipped`
        those that an outer step changes.
        """
        for fragment in self._local.meets_after(step):
            self._meet(fragment)
        changing = self._local.changes_after(step)
        changed = [
            one for one in self._buckets if not self._fragments[one.name].isdisjoint(changing)
        ]
        for fragment in changing if self._local.delay else ():
            for bucket in self._buckets:
                self._take(bucket, fragment, self._gradients[bucket.name])
        for bucket in changed:
            if (values := self._values[bucket.name]) is not bucket.value_slice:
                bucket.value_slice.copy_(values)
        if skipped:
            return changed
        held_back = self.held_back(step)
        return [bucket for bucket in self._buckets if bucket.name in held_back]

    def settle(self) -> None:
        """Wait until no sum is under way: sums are in memory, and change no more."""
        for pending in self._pending.values():
            for one in pending:
                one.wait()

    def state(self) -> dict[str, Flats]:
        """Outer state by kind, as views of this rank's slices."""
        kinds = {PARAMETERS: self._parameters}
        if self._momentum:
            kinds[MOMENTUM] = self._momentum
        if self._gradients:
            kinds[GRADIENTS] = self._gradients
        return dict(kinds)

    def held(self) -> Mapping[str, Sequence[torch.Tensor]]:
        """The outer state."""
        return {
            kind.replace(".", " "): list(flats.values()) for kind, flats in self.state().items()
        }

    def proven(self) -> ShardsByKind:
        """Outer parameters and momentum."""
        return {kind: shards for kind, shards in self._shards().items() if kind != GRADIENTS}

    def shared_state(self, held: NamedShards) -> NamedShards:
        """Outer state, which all islands share, and the state that ranks of this one share."""
        agreed = {
            f"{kind} {name}": shards
            for kind, by_name in self._shards().items()
            for name, shards in by_name.items()
        }
        island = self._islands.index
        return {**agreed, **{f"island {island}: {name}": one for name, one in held.items()}}

    def _shards(self) -> ShardsByKind:
        return {
            kind: bucket_shards(
                self._buckets, [flats[bucket.name] for bucket in self._buckets], self._groups
            )
            for kind, flats in self.state().items()
        }

    def _meet(self, fragment: int) -> None:
        """Start to sum a fragment over islands; without delay, take its outer step as well."""
        if self._local.delay:
            for bucket in self._buckets:
                self._start(bucket, fragment, self._gradients[bucket.name])
            return
        if self._quantised is not None:
            self._meet_in_codes(fragment, self._quantised)
            return
        under_way: deque[tuple[Bucket, torch.Tensor]] = deque()
        for bucket in self._buckets:
            if not self._runs[bucket.name][fragment]:
                continue
            moved = torch.empty_like(self._parameters[bucket.name])
            self._start(bucket, fragment, moved)
            under_way.append((bucket, moved))
            if len(under_way) == MAX_IN_FLIGHT:
                first, summed = under_way.popleft()
                self._take(first, fragment, summed)
        for first, summed in under_way:
            self._take(first, fragment, summed)

    def _meet_in_codes(self, fragment: int, quantised: QuantisedGradients) -> None:
        """Send a fragment in 8 bits, bucket by bucket, and take its outer step."""
        met = [one for one in self._buckets if self._runs[one.name][fragment]]
        moved = {one.name: self._parameters[one.name] - self._values[one.name] for one in met}
        like = torch.empty(0, dtype=self._dtype, device=self._device)
        most = quantised.largest_numbers(fragment, moved, like)
        for bucket in met:
            mean = moved.pop(bucket.name)
            quantised.mean(bucket, fragment, mean, most)
            self._apply(bucket, fragment, mean)

    def _start(self, bucket: Bucket, fragment: int, moved: torch.Tensor) -> None:
        """Write what the island moved into `moved`, and start to sum it over islands."""
        outer, values = self._parameters[bucket.name], self._values[bucket.name]
        name, pending = f"outer gradients.{bucket.name}", self._pending
        for run in self._runs[bucket.name][fragment]:
            torch.sub(outer[run], values[run], out=moved[run])
            sums = self._islands.all_reduce(moved[run], name=name, async_op=True)
            pending.setdefault((bucket.name, fragment), []).append(sums)

    def _take(self, bucket: Bucket, fragment: int, moved: torch.Tensor) -> None:
        """Take the outer step of a fragment from the sum of what all islands moved."""
        for pending in self._pending.pop((bucket.name, fragment), ()):
            pending.wait()
        for run in self._runs[bucket.name][fragment]:
            moved[run].div_(self._local.islands)
        self._apply(bucket, fragment, moved)

    def _apply(self, bucket: Bucket, fragment: int, mean: torch.Tensor) -> None:
        """Take the outer step of a fragment from the mean of what all islands moved."""
        for run in self._runs[bucket.name][fragment]:
            self._apply_run(bucket, run, mean[run])

    def _apply_run(self, bucket: Bucket, run: slice, mean: torch.Tensor) -> None:
        """Take the outer step of one run of a slice, which uses up the mean of it."""
        outer, values = self._parameters[bucket.name], self._values[bucket.name]
        momentum = self._momentum.get(bucket.name)
        state = None if momentum is None else momentum[run]
        outer_update(self._local, outer[run], mean, state)
        # An island that was ahead meanwhile keeps a share of that.
        own = self._local.own_share
        values[run].copy_(outer[run] if not own else own * values[run] + (1 - own) * outer[run])


def _wide(values: torch.Tensor) -> torch.Tensor:
    """Return memory for outer state: of the dtype of the values, float32 at the least."""
    return torch.zeros_like(values, dtype=torch.promote_types(values.dtype, torch.float32))


def _fragment_runs(local: LocalSgd, bucket: Bucket) -> tuple[tuple[slice, ...], ...]:
    placed = [SlotRange(spec=one.spec, start=one.start, stop=one.end) for one in bucket.slots]
    ranges = fragment_ranges(local, placed, range(bucket.own.start, bucket.own.stop))
    return tuple(tuple(slice(run.start, run.stop) for run in runs) for runs in ranges)


def outer_update(
    local: LocalSgd,
    parameters: torch.Tensor,
    mean: torch.Tensor,
    momentum: torch.Tensor | None,
) -> None:
    """Update outer `parameters` in place, and `momentum`, which Nesterov's steps have.

    `mean` [the shape of both] is used up.
    """
    if momentum is not None:
        momentum.mul_(local.outer_momentum).add_(mean)
        mean.add_(momentum, alpha=local.outer_momentum)
    parameters.sub_(mean, alpha=local.outer_learning_rate)
