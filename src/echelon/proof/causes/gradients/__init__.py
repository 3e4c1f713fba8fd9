# SPDX-License-Identifier: Apache-2.0
"""Wrong gradients: sums that are missing, weights of microbatches, other ranks' parts, norms.

microbatch_weights.py   weights of microbatches, and of the step before
context.py              sums over context ranks; gradients of keys and values on their way home
experts.py              experts and routers
norm_layers.py          rows that are missing in the gradient of a norm layer
gradients.py            a wrong gradient, the most telling explanation first
norm.py                 a wrong gradient norm
"""
