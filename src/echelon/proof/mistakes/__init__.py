# SPDX-License-Identifier: Apache-2.0
"""Known mistakes, committed on one device: what gives the observed numbers is what went wrong.

forward.py               blocks, vocabulary, positions, heads, factors of weights
rows.py                  rows of a split sequence that are taken for others
context.py               attention over a split sequence, with attention.py
row_pieces.py            one piece of rows, or one tile of attention
dropout.py               masks that depend on the layout, or on too little
experts.py               gates, drops, and the order of rows of experts
outdated_parameters.py   values of before the last update
threads.py               replicas on threads: old parameters, weighted sums
gradient_misrouting.py   gradients of keys and values that come home wrong
expert_gradients.py      shares of loads, gates and recomputes that are wrong in backward
"""
