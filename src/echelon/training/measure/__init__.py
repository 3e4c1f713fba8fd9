# SPDX-License-Identifier: Apache-2.0
"""Measure kernels, collectives, units and steps on the ranks of this machine.

machine.py      products, attention, moves, updates and collectives, on all ranks at once
unit_times.py   forward and backward of the embedding, a block, and the head
steps.py        steps of a plan, by the engine that trains
"""
