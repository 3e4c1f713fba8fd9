# SPDX-License-Identifier: Apache-2.0
"""From the first thing that is wrong to a name for it: tensor, place, factor, axis.

diagnose.py             the first failure, and who explains it
diagnosis.py            what a finding says; the axis that tells wrong from right ranks
activations.py          between which two places a pass goes wrong, with norm_layers.py
losses.py               wrong losses, and loss scales
gradients.py            wrong gradients, by
  microbatch_weights.py   weights of microbatches
  context.py              sums over context ranks, with context_parts.py
  experts.py              experts and routers
  misplaced.py            gradients of other microbatches, slices of other ranks
norm.py                 wrong gradient norms
updates.py              wrong updates, and parameters that are not written back
  optimizer_constants.py  counts, epsilons and decays that are others
  optimizer_state.py      state of an earlier update, or of another tensor
places.py               which slice is wrong where the rest is right
low_precision.py        what is wrong in a narrow dtype only
routing.py              wrong routes, loads, losses and biases
races.py                the first race of a run with late completion
token_ranks.py          which rank holds each position, and routes each token
"""
