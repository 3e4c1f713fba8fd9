# SPDX-License-Identifier: Apache-2.0
"""Wrong gradients: sums that are missing, weights of microbatches, other ranks' parts, norms.

sums.py                 copies that differ and are to be summed
microbatch_weights.py   weights of microbatches, and of the step before
context.py              sums over context ranks; gradients of keys and values on their way home
experts.py              experts and routers
norm_layers.py          rows that are missing in the gradient of a norm layer
gradients.py            a wrong gradient of a plan, the most telling explanation first
captured.py             a wrong gradient of a captured program
norm.py                 a wrong gradient norm
"""
