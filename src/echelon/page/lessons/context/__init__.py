# SPDX-License-Identifier: Apache-2.0
"""Lessons about long sequences.

ring.py             keys and values go around a ring, as four ranks recorded it
slices.py           keys and values sliced along the sequence, or by layers
"""
