"""The update of a rank's slices: whatever the ZeRO stage, the optimizer, and where state rests.

Every rank updates its slice of each bucket: all of it at stage 0. The values that are updated are
the parameters themselves or, where the plan keeps them in another dtype, a master copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

from echelon.core.plan import Plan
from echelon.cost.muon import muon_exchange
from echelon.cost.stage import expert_index_of, pp_rank_of
from echelon.cost.updates import STATE_KINDS, Update
from echelon.parallel.buckets import Bucket
from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.dtypes import TORCH_DTYPES
from echelon.parallel.offload import Rest
from echelon.train.optimizer.adamw import AdamW
from echelon.train.optimizer.elements import Slices, update_elements
from echelon.train.optimizer.jobs import Job, Tensors, in_order, run_jobs
from echelon.train.optimizer.links import MuonLinks
from echelon.train.optimizer.muon import Muon
from echelon.train.optimizer.parts import parts_of
from echelon.train.optimizer.sgd import Momentum

MASTER = "master"
"""The kind of state that is the copy of the parameters which the optimizer updates."""


class SliceOptimizer:
    """Update the slices of a rank with AdamW, SGD or Muon, each fused."""

    def __init__(
        self, buckets: Sequence[Bucket], plan: Plan, *, rest: Rest, groups: RankGroups
    ) -> None:
        """Reserve the state of `buckets` in `rest`; the ranks of a stage do so together."""
        settings, precision = plan.mathematics.optimizer, plan.mathematics.precision
        self.rest = rest
        self._buckets, self._settings = buckets, settings
        self._has_master, self._dtype = precision.has_master, TORCH_DTYPES[precision.master]
        self._rules: Mapping[Update, AdamW | Momentum] = {
            "adamw": AdamW(settings),
            "sgd": Momentum(settings),
        }
        self._parts = {bucket.name: parts_of(bucket) for bucket in buckets}
        self._num_steps = 0
        matrices = [bucket for bucket in buckets if bucket.plan.update == "muon"]
        if matrices:
            share = expert_index_of(plan, groups.rank)
            exchange = muon_exchange(plan, pp_rank_of(plan, groups.rank), share)
            links = MuonLinks(group=groups.stage, exchange=exchange)
            self._muon = Muon(settings, links, matrices)
        for bucket in buckets:
            for kind in self._kinds(bucket):
                rest.add(_key(bucket, kind), bucket.value_slice.numel(), self._dtype)

    def set_num_steps(self, num_steps: int) -> None:
        """Say how many updates the state has seen (it is filled in place through `state`)."""
        self._num_steps = num_steps

    def update(
        self, learning_rate: float, factor: float, updated: Callable[[Bucket], None]
    ) -> None:
        """Update the parameters from the gradients times `factor`.

        `updated` is called with each bucket once its slice has its new values. Gradients are
        multiplied in place, unless they are cast.
        """
        self._num_steps += 1
        for rule in self._rules.values():
            rule.start_update(self._num_steps)
        run_jobs(self._jobs(learning_rate, factor, updated))

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return kind -> name of bucket -> slice, as views; "master" is among the kinds."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        for bucket in self._buckets:
            for kind in self._kinds(bucket):
                found.setdefault(kind, {})[bucket.name] = self.rest.view(_key(bucket, kind))
        return found

    def _kinds(self, bucket: Bucket) -> tuple[str, ...]:
        """Return the kinds of state that a bucket has: none where all of it is frozen."""
        if not any(slot.parameter.requires_grad for slot in bucket.slots):
            return ()
        return (*STATE_KINDS[bucket.plan.update], *((MASTER,) if self._has_master else ()))

    def _jobs(self, rate: float, factor: float, updated: Callable[[Bucket], None]) -> Iterator[Job]:
        trained = [bucket for bucket in self._buckets[::-1] if self._kinds(bucket)]
        for kind, bucket in in_order(trained):
            if kind == "elements":
                yield Job(
                    wants=self._wants(bucket, STATE_KINDS[bucket.plan.update]),
                    run=partial(self._elements, bucket, rate, factor),
                    done=partial(updated, bucket),
                )
            elif kind == "send":
                momentum = Tensors(rest=self.rest, keys=(_key(bucket, "momentum"),))
                yield Job(wants=[momentum], run=partial(self._send, bucket, factor))
            elif kind == "orthogonalise":
                yield Job(wants=[], run=partial(self._orthogonalise, bucket))
            else:
                yield Job(
                    wants=self._wants(bucket, ()),
                    run=partial(self._apply, bucket, rate),
                    done=partial(updated, bucket),
                )

    def _wants(self, bucket: Bucket, kinds: tuple[str, ...]) -> list[Tensors]:
        """Return state of some kinds, the master copy and the values, but for what is at hand."""
        kinds = (*kinds, *((MASTER,) if self._has_master else ()))
        wants: list[Tensors] = []
        if kinds:
            wants.append(Tensors(rest=self.rest, keys=tuple(_key(bucket, kind) for kind in kinds)))
        if bucket.rest is not None:
            read = not self._has_master
            wants.append(Tensors(rest=bucket.rest, keys=(bucket.values_key,), read=read))
        return wants

    def _elements(
        self, bucket: Bucket, rate: float, factor: float, tensors: list[torch.Tensor]
    ) -> None:
        num_state = len(STATE_KINDS[bucket.plan.update])
        target, values = self._target(bucket, tensors[num_state:])
        update_elements(
            self._rules[bucket.plan.update],
            Slices(
                gradient=bucket.gradient_slice,
                values=values,
                target=target,
                state=tensors[:num_state],
                scratch=bucket.rest is not None,
            ),
            self._parts[bucket.name],
            rate=rate,
            factor=factor,
            weight_decay=self._settings.weight_decay,
        )

    def _send(self, bucket: Bucket, factor: float, tensors: list[torch.Tensor]) -> None:
        (momentum,) = tensors
        self._muon.send_pieces(bucket, bucket.gradient_slice, momentum, factor)

    def _orthogonalise(self, bucket: Bucket, tensors: list[torch.Tensor]) -> None:
        assert not tensors, "only messages are read"
        self._muon.orthogonalise(bucket)

    def _apply(self, bucket: Bucket, rate: float, tensors: list[torch.Tensor]) -> None:
        target, values = self._target(bucket, tensors)
        self._muon.apply(bucket, target, rate)
        if target is not values:
            values.copy_(target)

    def _target(
        self, bucket: Bucket, tensors: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is updated (master copy or values) and the values, of what was fetched."""
        values = bucket.value_slice if bucket.rest is None else tensors[-1]
        return (tensors[0] if self._has_master else values), values


def _key(bucket: Bucket, kind: str) -> str:
    return f"{bucket.name}.{kind}"
