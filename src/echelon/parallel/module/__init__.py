# SPDX-License-Identifier: Apache-2.0
"""Data parallelism and ZeRO for any module, pipelines and context parallelism.

module      `apply_to_module`: what is done to a module, in order
loss        the loss of a module as a sum and a count
token_losses
            token losses from logits, without a second table of their size
forwards    linear layers and norms that compute the same in fewer passes (a room)
pipeline    stages of a module, by the list of its blocks (a room)
context     sequences of a module, by its calls of attention (a room)
start       what must hold before, and the values that ranks share
units       the parts that are gathered at a time
unit_order  in which order they are used, and what that asks for
hooks       which unit is used when, seen in its forward and backward
gathering   ZeRO stage 3: what is whole when
gradients   gradients from autograd, summed in one order on every rank
"""
