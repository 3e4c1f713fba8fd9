# SPDX-License-Identifier: Apache-2.0
"""Operations with their backward written by hand, and in low precision.

fused          norms, SwiGLU and rotations, as autograd functions
low_precision  the same for bf16 and fp16, a few rows at a time
width_norm     norms over all heads together, of which tensor ranks have parts
expert_kernels gradients and sums of rows of all experts at once
"""
