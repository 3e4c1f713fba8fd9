# SPDX-License-Identifier: Apache-2.0
"""Constants of the formulas, fitted to what was measured.

samples   what is measured of a machine, and the shapes that are
solver    least squares on logarithms, with bounds and spreads
device    rates of a device, from kernels
links     bandwidth and latency of links, from collectives
merge     several measured clusters as one
runs      constants of our trainer from steps, and of a cluster from a run
"""
