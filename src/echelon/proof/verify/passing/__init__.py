# SPDX-License-Identifier: Apache-2.0
"""What passes through a program, where a claim that fails has no cause yet.

watch.py            outputs of modules, gradients with respect to them, and labels, seen by hooks
places.py           which part of what one device has a rank's tensor is
activations.py      the first wrong module, forward or backward
token_losses.py     a wrong loss, label by label
lost_weights.py     a weight without a gradient, whose module has one
"""
