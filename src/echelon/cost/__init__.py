# SPDX-License-Identifier: Apache-2.0
"""The only formulas: bytes and seconds of a plan. Each stands once, with its source; no torch.

Rooms, each of which imports from those above it in this list alone:

inputs        numbers of models, machines, layouts and trainers, for one plan or arrays of millions
bytes         what ranks hold and send: equal to what a run holds and sends
activations   what forward passes keep for backward, and the peak of a step
peak          the highest moment of a rank in a step, all that is there together
seconds       the one model of seconds, for one plan or arrays of millions
fit           its constants, fitted to what was measured of devices, links and runs
"""
