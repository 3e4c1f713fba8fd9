# SPDX-License-Identifier: Apache-2.0
"""Wrong gradients: sums that are missing, weights of microbatches, other ranks' parts, norms.

microbatch_weights.py   what a wrong gradient is; weights of microbatches, and of the step before
norm.py                 a wrong gradient norm
context.py              sums over context ranks; gradients of keys and values on their way home
experts.py              experts and routers
norm_layers.py          rows that are missing in the gradient of a norm layer
captured.py             a wrong gradient of a program beside those of its ranks and their backwards
gradients.py            a wrong gradient of any program, the most telling explanation first
"""
