# SPDX-License-Identifier: Apache-2.0
"""The seams of a step, and the parts that join it without a room of their own.

part.py            where a mode joins: every method of a part, all parts of a rank as one
loss_scale.py      the factor of the loss in fp16
fp8_scales.py      the scales of whole tensors in 8 bits
expert_balance.py  the loads of experts, and the biases that follow from them

The part of local SGD has a room of its own; `core/choices/step_parts.py` lists all parts.
"""
