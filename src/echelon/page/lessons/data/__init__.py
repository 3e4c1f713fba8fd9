# SPDX-License-Identifier: Apache-2.0
"""Lessons about ranks that read different samples.

flow.py             a step of data parallelism, phase by phase
batch.py            32 samples, four ranks, one update
recorded.py         what four ranks recorded of two steps
"""
