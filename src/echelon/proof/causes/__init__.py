# SPDX-License-Identifier: Apache-2.0
"""From the first thing that is wrong to a name for it: tensor, place, factor, axis.

Known mistakes are committed on one device: the one that gives what the ranks have is the cause.
Each room imports those above it only.

finding.py              what a finding says; the axis that tells wrong from right ranks
token_ranks.py          which rank holds each position and routes each token; sums by context rank
factors.py              wrong factors that have a name
places.py               which slice is wrong where the rest is right
forward/                wrong forward passes, by the losses that they give
passing/                between which modules a captured program goes wrong
gradients/              wrong gradients, and their norm
updates/                wrong updates, outer steps, and parameters that are not written back
activations.py          between which two places a pass goes wrong
routing.py              wrong routes, loads, losses and biases
first_weights.py        another slice, expert, order or seed
diagnose.py             the first failure of any program; the races of a plan
"""
