# SPDX-License-Identifier: Apache-2.0
"""What forward passes keep for backward, operator by operator, and the peak of a step.

numbers              the letters of the formulas
operator_memory      what one operator keeps and works with
linear               norms, MLPs, dropout and residual branches
attention, latent    grouped-query attention, latent attention
attention_working    what attention over context ranks or in tiles works with
experts, dispatch    a mixture: routing, experts, rows that come and go
expert_numbers       how many rows those are
units                embedding, blocks and head as operators
peaks                the most that a unit holds, forward and backward
timeline             a rank's step, action by action
closed_forms         what a block keeps, for arrays of plans
"""
