# SPDX-License-Identifier: Apache-2.0
"""Wrong updates, the gradient being right.

optimizer_constants.py  counts, epsilons and decays that are others
updates.py              factors, decay, clip, state of an earlier update or of another tensor
captured.py             updates and optimizer state of a captured program
outer_steps.py          what islands make of their meetings
"""
