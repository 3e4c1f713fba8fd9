# SPDX-License-Identifier: Apache-2.0
"""The oracle: the same training on one device, in plain code.

oracle.py       the steps: loss, gradients, norm, clip, update; their parts, and what passes in them
batches.py      made-up global batches
operations.py   attention that rounds as kernels do; tokens that go where ranks sent them
fp8.py          8-bit numbers: linear layers, and int8 weights
routing.py      how one device routes tokens to experts: losses, loads, biases
optimizers.py   AdamW, SGD and Muon as in the papers; learning rate, norm, clip, loss scale
loss_scale.py   the loss scale of a proof: overflow in known steps, or nowhere
"""
