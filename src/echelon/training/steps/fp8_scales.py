# SPDX-License-Identifier: Apache-2.0
"""Scales of whole tensors in 8 bits as a part of each step: the numbers that they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.fp8_scales import TensorScales
from echelon.parallel.storage.buckets import Bucket
from echelon.training.steps.part import StepPart, StepPlace, StepResult

FP8_SCALES = "fp8_scales"
"""Key of the largest numbers of the steps before, in a position of a checkpoint."""


class Fp8Scales(StepPart):
    """Note the largest numbers of a step, and find the scales of the next one."""

    def __init__(self, scales: TensorScales, buckets: Sequence[Bucket], groups: RankGroups) -> None:
        """Keep `scales` of the weights in `buckets` and of what is multiplied with them."""
        self.scales, self._buckets, self._groups = scales, buckets, groups

    def running(self, loss_scale: float) -> AbstractContextManager[None]:
        """Note the largest numbers of inputs and gradients."""
        del loss_scale
        return self.scales.training()

    def updated(self, bucket: Bucket) -> None:
        """Note the largest weights of a slice."""
        self.scales.note_weights(bucket, self._groups)

    def end_step(self, result: StepResult) -> StepResult:
        """Share the largest numbers with all ranks."""
        self.scales.end_step(self._buckets, self._groups)
        return result

    def position(self) -> Mapping[str, Any]:
        """Largest numbers of the steps before."""
        return {FP8_SCALES: self.scales.state()}

    def resume(self, position: Mapping[str, Any]) -> None:
        """Go on from the numbers of a run with such scales; without them begin anew."""
        if FP8_SCALES in position:
            self.scales.load(position[FP8_SCALES])


def fp8_scales(place: StepPlace) -> Fp8Scales | None:
    """The part of a rank; None if tiles have scales, or nothing is in 8 bits."""
    model = place.model
    return None if model.scales is None else Fp8Scales(model.scales, model.buckets, place.groups)
