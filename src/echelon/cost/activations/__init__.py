# SPDX-License-Identifier: Apache-2.0
"""Bytes that forward passes keep for backward, operator by operator, and the peak of a step.

numbers             the letters of the formulas, those of a plan; memory of one operator
linear              norms, MLPs, dropout and residual branches; products in 8 bits
attention           grouped-query attention and latent attention
attention_working   attention over context ranks or in tiles, call by call of a kernel
experts, dispatch   a mixture: routing, experts, rows that come and go
expert_numbers      how many rows those are
units               embedding, blocks and head as operators, some of them made again
timeline            a rank's step, action by action, and the most that an action holds
closed_forms        bytes that a block keeps, for arrays of plans
"""
