# SPDX-License-Identifier: Apache-2.0
"""The seams of a step, and the parts that join it without a room of their own.

part.py        where a mode joins: every method of a part, and what a step returns
parts.py       all parts of a rank, assembled from its plan
loss_scale.py  the factor of the loss in fp16
fp8_scales.py  the scales of whole tensors in 8 bits
agreement.py   what all ranks must know of a step

The parts of experts and of local SGD are in rooms of their own; `core/choices/step_parts.py` lists
all of them.
"""
