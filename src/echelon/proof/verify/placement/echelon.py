# SPDX-License-Identifier: Apache-2.0
"""Echelon's own `parallelize`: slices of flat buckets, and pieces of tensor ranks.

Gradients are read when the optimizer is about to update: summed, before they are clipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from echelon.layout.modules import TensorPiece
from echelon.parallel.module.module import RankModule
from echelon.parallel.storage.buckets import Bucket, Slot
from echelon.parallel.storage.weights import stored_values
from echelon.proof.verify.placement.located import Interposed, LocatedTensor, equal_slice, located
from echelon.proof.verify.placement.program import Program
from echelon.proof.verify.placement.torch_store import Fragment, HeldParameter, TorchStore


def is_echelon(program: Program) -> bool:
    """Return whether the optimizer of a program is that of a module that `parallelize` split."""
    return any(isinstance(getattr(one, "module", None), RankModule) for one in program.optimizers)


class EchelonStore(TorchStore):
    """Read what a rank holds of a module that is split."""

    reads_clipped = False

    def __init__(self, program: Program) -> None:
        """Find the place of every parameter."""
        self.program = program
        self.optimizer: Any = program.optimizers[0]
        self.module: RankModule = self.optimizer.module
        buckets = (*self.module.buckets, *self.module.frozen)
        self.slots = [(bucket, slot) for bucket in buckets for slot in bucket.slots]
        self.places = {slot.spec.name: self._place(slot.spec.name) for _, slot in self.slots}
        self.loose = [
            HeldParameter(name=name, parameter=one, place=self._place(name))
            for name, one in self.module.model.named_parameters()
            if name not in self.places and name not in self.module.foreign
        ]

    def on_update(self, before: Callable[[Any], None]) -> list[Any]:
        """Have `before` called when all is summed."""
        return [Interposed(self.optimizer, "_update", lambda: before(self.optimizer))]

    def parameters(self) -> Iterator[Fragment]:
        """Yield what rests on this rank of all parameters."""
        for bucket, slot in self.slots:
            yield from self._fragments(bucket, slot, stored_values(bucket))
        for held in self.loose:
            values = held.parameter.detach().reshape(-1)
            yield Fragment(name=held.name, place=held.place, values=values)

    def gradients(self, optimizer: Any) -> Iterator[Fragment]:
        """Yield this rank's slices of the mean of the gradients of data ranks."""
        factor = 1.0 / self.optimizer.loss_scale.value / self.optimizer.divisor
        for bucket, slot in self.slots:
            if slot.parameter.requires_grad:
                for one in self._fragments(bucket, slot, bucket.gradient_slice):
                    values = one.values * factor
                    yield Fragment(name=one.name, place=one.place, values=values, start=one.start)

    def state(self) -> Iterator[tuple[str, Fragment]]:
        """Yield this rank's slices of what the optimizer keeps."""
        for kind, held in self.optimizer.slices.state().items():
            for bucket, slot in self.slots:
                if bucket.name in held:
                    for one in self._fragments(bucket, slot, held[bucket.name]):
                        yield kind, one

    def leaves(self) -> Iterator[HeldParameter]:
        """Yield the parameters, in which backward makes what this rank gives to a sum."""
        for _, slot in self.slots:
            if slot.parameter.requires_grad:
                name = slot.spec.name
                yield HeldParameter(name=name, parameter=slot.parameter, place=self.places[name])

    def stand_ins(self) -> Iterator[Fragment]:
        """Yield nothing: parameters are those that the module was given with."""
        yield from ()

    def _fragments(self, bucket: Bucket, slot: Slot, flat: torch.Tensor) -> Iterator[Fragment]:
        """Yield the part of a parameter in a tensor that is a whole bucket, or the own slice."""
        whole, start = slice(slot.start, slot.end), 0
        if flat.numel() != bucket.plan.num_elements:
            whole = bucket.within_own_slice(whole)
            start = max(0, bucket.own.start - slot.start)
        values = flat[whole].detach()
        if values.numel():
            name = slot.spec.name
            yield Fragment(name=name, place=self.places[name], values=values, start=start)

    def _place(self, name: str) -> LocatedTensor:
        table, groups = self.program.table, self.module.groups
        canonical = table.resolve(name, name)
        elements = table.logical.elements(canonical)
        piece = self.module.split.piece_of(name)
        if piece is not None:
            elements = cut_elements(elements, piece, groups.tensor.size, groups.tensor.index)
        return located(canonical, elements)


def cut_elements(
    elements: torch.Tensor, piece: TensorPiece, degree: int, index: int
) -> torch.Tensor:
    """Return the numbers of the elements that a tensor rank holds; padding has none."""
    parts = elements.split(list(piece.parts), piece.dim)
    return torch.cat([equal_slice(part, piece.dim, degree, index) for part in parts], piece.dim)
