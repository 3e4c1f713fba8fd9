# SPDX-License-Identifier: Apache-2.0
"""Lessons about matrices that are cut over tensor ranks.

splits.py           shapes and collectives of both cuts, at the size of a model
column.py           a matrix cut by columns, in five steps
row.py              a matrix cut by rows, in five steps
pair.py             an MLP: columns, then rows, and nothing sent in the middle
toy_mlp.py          a whole small MLP on one rank, and on two
sums.py             what the lessons above say of what is sent, and of who holds what
"""
