# SPDX-License-Identifier: Apache-2.0
"""Measure kernels, collectives, units and steps on the ranks of this machine.

machine.py      products, attention, moves, updates and collectives, on all ranks at once
trainer.py      steps of a plan, by the engine that trains; units of a model, each way
"""
