# SPDX-License-Identifier: Apache-2.0
"""Wrong forward passes, run on one device: the one that gives the observed losses is the mistake.

attention.py    heads and keys of attention that are others
variants.py     a model that makes one mistake; blocks, heads, positions, factors, dropout
row_pieces.py   rows that come from another rank, piece by piece or chunk by chunk
context.py      positions, labels, heads and keys of a sequence that is split
experts.py      routers and experts
losses.py       wrong losses, and loss scales: which mistake gives them
"""
