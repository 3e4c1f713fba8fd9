# SPDX-License-Identifier: Apache-2.0
"""What a module of one's own sends, beside its data ranks' gradients and parameters.

pipeline    what a rank sends in a step, by axis: stages, and data ranks in them
tensor      over tensor ranks
experts     of stacks of experts over tensor ranks, for each call
context     for attention over context ranks

Data parallelism and ZeRO alone are `module_bytes` in `cost/bytes/data.py`.
"""
