"""Seconds of matrix products and of operators that move bytes, by the shape a device really sees.

A product of [m, k] by [k, n] is 2 m n k FLOPs, done in tiles of the result, a tile on each unit
at a time. What is lost: rows and columns of the last tiles (tile quantisation), units that are idle
in the last wave (wave quantisation; kernels that split the depth hide half of it), and the time to
fill a tile, which a deep product amortises: k / (k + half_depth). Below that lies the memory's
bandwidth. Source: NVIDIA, Matrix Multiplication Background User's Guide (2023), sections 2 to 4.
"""

from __future__ import annotations

import numpy as np

from echelon.cost.lattice.numbers import MachineNumbers, Num, ceil_div

HIDDEN_OF_WAVE = 0.5
"""Share of the idle units of a last wave that kernels which split the depth put to work."""


def product_seconds(machine: MachineNumbers, rows: Num, depth: Num, columns: Num) -> Num:
    """Return the seconds of [rows, depth] x [depth, columns] in 2-byte elements."""
    flops = 2.0 * rows * depth * columns
    rate = machine.peak_flops * machine.matmul * _shape_share(machine, rows, depth, columns)
    moved = 2.0 * (rows * depth + depth * columns + rows * columns)
    return np.maximum(flops / rate, moved / (machine.memory_bandwidth * machine.memory))


def moved_seconds(machine: MachineNumbers, num_bytes: Num) -> Num:
    """Return the seconds in which the memory of a device reads or writes `num_bytes`."""
    return num_bytes / (machine.memory_bandwidth * machine.memory)


def _shape_share(machine: MachineNumbers, rows: Num, depth: Num, columns: Num) -> Num:
    tile = machine.tile
    row_tiles = ceil_div(np.maximum(rows, 1.0), tile)
    column_tiles = ceil_div(np.maximum(columns, 1.0), tile)
    filled = rows * columns / (row_tiles * column_tiles * tile * tile)
    tiles = row_tiles * column_tiles
    busy = tiles / (ceil_div(tiles, machine.units) * machine.units)
    busy = busy + HIDDEN_OF_WAVE * (1.0 - busy)
    deep = depth / (depth + machine.half_depth)
    return np.maximum(filled * busy * deep, 1e-6)
