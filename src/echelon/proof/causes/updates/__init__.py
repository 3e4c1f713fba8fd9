# SPDX-License-Identifier: Apache-2.0
"""Wrong updates, the gradient being right.

optimizer_constants.py  counts, epsilons and betas that are others; optimizer state of a program
updates.py              factors, decay, clip, state of an earlier update or of another tensor
outer_steps.py          what islands make of their meetings
"""
