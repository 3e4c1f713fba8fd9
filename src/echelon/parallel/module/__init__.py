# SPDX-License-Identifier: Apache-2.0
"""Data parallelism and ZeRO for any module, pipelines and context parallelism.

module      `apply_to_module`: what is done to a module, in order; its units
loss        the loss of a module as a sum and a count; token losses from logits, whole or split
forwards    linear layers and norms that compute the same in fewer passes (a room)
pipeline    stages of a module, by the list of its blocks (a room)
context     sequences of a module, by its calls of attention
start       what must hold before, and the values that ranks share
hooks       which unit is used when, seen in its forward and backward
gathering   ZeRO stage 3: in which order units are used, and what is whole when
gradients   gradients from autograd, summed in one order on every rank
"""
