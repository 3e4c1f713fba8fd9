# SPDX-License-Identifier: Apache-2.0
"""Lessons about matrices that are cut over tensor ranks.

splits.py           shapes and collectives of both cuts, at the size of a model
linear.py           a matrix cut by columns, and one cut by rows, in five steps each
pair.py             an MLP: columns, then rows, and nothing sent in the middle
toy_mlp.py          a whole small MLP on one rank, and on two
"""
