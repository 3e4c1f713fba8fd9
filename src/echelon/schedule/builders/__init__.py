# SPDX-License-Identifier: Apache-2.0
"""Builders of the schedules that have a paper, each with its source.

builder         what every builder offers
gpipe           GPipe, and the naive schedule beside it
one_f_one_b     1F1B
interleaved     several stages on a rank: interleaved 1F1B, breadth-first
zero_bubble     a split backward pass: ZB-H1, ZB-H2, ZB-V
dualpipe        microbatches from both ends: DualPipe, DualPipeV
"""
