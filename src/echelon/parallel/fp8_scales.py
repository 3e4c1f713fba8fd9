# SPDX-License-Identifier: Apache-2.0
"""Scales of whole tensors in 8 bits, which come from the largest numbers of the steps before.

Split: nothing; every rank holds all scales of the model.
Sent:  at the end of a step one all-reduce of the largest numbers, over all ranks: of each group of
       layers (`layout/buckets.py`) its input, the gradient of its output, and its weights.
Bytes: `fp8_maxima_bytes` in `cost/bytes/quantised.py`.
Must divide: nothing.
Source: NVIDIA, Transformer Engine, "FP8 delayed scaling" (`DelayedScaling`, algorithm "max").

A microbatch is no tensor that scales could come from: with another microbatch it would be another
one. The whole global batch is, and its largest number is exact however it is split; but no rank
knows it before the step is over. So the scale of an input and of a gradient is the least power of
two that brings in range the largest number of the last `precision.fp8_history` steps; what is
larger in this step becomes the largest number of the format. Weights are known when a step is over,
and have a scale of the matrix as it is. The first step has no history, and scales of tiles.

What was not finite is no news for the history: it is nowhere hidden in the products of its step,
and the steps after it have the scale that the ones before had. What has been zero in all of the
history (an expert without rows) has the scale 1.

Nothing here waits for a device: numbers stay where they are until a checkpoint asks for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from echelon.core.plan import Plan
from echelon.layout.buckets import fp8_group_of, fp8_groups
from echelon.models.precision import E4M3, E5M2, TORCH_DTYPES, at_least_fp32
from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.kernels.fp8 import power_of_two_scales
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.storage.weights import slot_rectangles, stored_values

if TYPE_CHECKING:
    from collections.abc import Iterator

INPUTS = 0  # row of the table of largest numbers, in which a column is a group of layers
GRADIENTS = 1  # row of the same, of the gradients of outputs
WEIGHTS = 2  # row of the same, the last one
_NUM_ROWS = 3  # of the same


class TensorScales:
    """Hold the scales of this step, the largest numbers in it so far, and those of steps before."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        """Begin without a history: the first step has scales of tiles."""
        precision = plan.mathematics.precision
        self.groups = fp8_groups(plan.model)
        self._places = {name: place for place, name in enumerate(self.groups)}
        self._num_steps = precision.fp8_history
        self._kinds = E4M3, E5M2 if precision.fp8_gradients == "e5m2" else E4M3, E4M3
        dtype = at_least_fp32(TORCH_DTYPES[precision.parameters])
        self._largest = torch.zeros((_NUM_ROWS, len(self.groups)), dtype=dtype, device=device)
        self._history: list[torch.Tensor] = []
        self._weights = self._largest[WEIGHTS].clone()
        self._scales: torch.Tensor | None = None
        self._linears: dict[int, int] = {}
        self._noted: set[str] = set()
        self._notes = False

    def learn(self, stages: Iterable[nn.Module]) -> None:
        """Learn which layers of the stages of a rank are of which group."""
        for stage in stages:
            for name, module in stage.named_modules():
                group = fp8_group_of(f"{name}.weight")
                if group is not None:
                    self._linears[id(module)] = self._places[group]

    @contextmanager
    def training(self) -> Iterator[None]:
        """Note the largest numbers of a step, which is what is cast inside: no evaluation."""
        self._largest.zero_()
        self._notes = True
        try:
            yield
        finally:
            self._notes = False

    def scale(self, kind: int, linears: Sequence[nn.Linear]) -> torch.Tensor | None:
        """Return the scale of layers that read the same input; None before there is a history."""
        if self._scales is None:
            return None
        return self._scales[kind, self._linears[id(linears[0])]]

    def note(self, kind: int, x: torch.Tensor, linears: Sequence[nn.Linear]) -> None:
        """Note the largest number of what layers that read the same input cast, before they do."""
        if not self._notes or not x.numel():
            return
        # The largest of all, and no number where one of them is none.
        low, high = torch.aminmax(x)
        entry = self._largest[kind, self._linears[id(linears[0])]]
        torch.maximum(entry, torch.maximum(-low, high).to(entry.dtype), out=entry)

    @torch.no_grad()
    def note_weights(self, bucket: Bucket, groups: RankGroups) -> None:
        """Note the weights that this rank has updated, before they are gathered.

        What rests elsewhere than on the device is on its way there: the end of the step looks.
        """
        if bucket.offload_store is None:
            self._note_bucket(bucket, bucket.value_slice, groups)

    @torch.no_grad()
    def end_step(self, buckets: Sequence[Bucket], groups: RankGroups) -> None:
        """Share the largest numbers of a step, and of weights after its update, with all ranks."""
        for bucket in buckets:
            if bucket.name not in self._noted:
                # It rests elsewhere, or was not updated, and is not gathered then.
                away = bucket.offload_store is not None
                flat = stored_values(bucket) if away else bucket.value_slice
                self._note_bucket(bucket, flat, groups)
        self._noted.clear()
        # No number is larger than any: what is not finite anywhere is infinite everywhere.
        self._largest.nan_to_num_(nan=torch.inf, posinf=torch.inf)
        groups.world.all_reduce(self._largest, name="fp8.maxima", op="max")
        found = self._largest[:WEIGHTS]
        found = torch.where(found.isfinite(), found, 0.0)
        self._history = [*self._history, found][-self._num_steps :]
        self._weights = self._largest[WEIGHTS].clone()
        self._find_scales()

    def state(self) -> dict[str, Any]:
        """Return what `load` needs to go on from here, as JSON; waits for the device."""
        return {
            "groups": list(self.groups),
            "weights": self._weights.tolist(),
            "history": [one.tolist() for one in self._history],
        }

    def scales(self) -> list[list[float]]:
        """Scales of the next step, a row of each kind; none before there is a history."""
        return [] if self._scales is None else self._scales.tolist()

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`; where the history is shorter now, its last steps count."""
        assert tuple(state["groups"]) == self.groups, "the model is the same"
        like = self._largest
        self._history = [like.new_tensor(one) for one in state["history"]][-self._num_steps :]
        self._weights = like.new_tensor(state["weights"])
        self._find_scales()

    def _note_bucket(self, bucket: Bucket, flat: torch.Tensor, groups: RankGroups) -> None:
        self._noted.add(bucket.name)
        for slot in bucket.slots:
            group = fp8_group_of(slot.spec.name)
            if group is not None:
                tensor = groups.tensor_group_for(slot.spec)
                parts = [part for _, part in slot_rectangles(slot, flat, tensor)]
                self._note_parts(self._places[group], parts)

    def _note_parts(self, place: int, parts: Sequence[torch.Tensor]) -> None:
        entry = self._largest[WEIGHTS, place]
        for part in parts:
            low, high = torch.aminmax(part)
            most = torch.maximum(-low, high).to(entry.device, entry.dtype)
            torch.maximum(entry, most, out=entry)

    def _find_scales(self) -> None:
        if not self._history:
            self._scales = None
            return
        most = torch.stack(self._history).amax(0)
        # A new tensor: what waits for its products still has the scales of its step.
        self._scales = torch.stack(
            [
                power_of_two_scales(most[INPUTS], self._kinds[INPUTS]),
                power_of_two_scales(most[GRADIENTS], self._kinds[GRADIENTS]),
                power_of_two_scales(self._weights, self._kinds[WEIGHTS]),
            ]
        )


def tensor_scales(plan: Plan, device: torch.device) -> TensorScales | None:
    """Return the scales of a rank; None where tiles have them, or nothing is in 8 bits."""
    return TensorScales(plan, device) if plan.mathematics.precision.has_tensor_scales else None
