# SPDX-License-Identifier: Apache-2.0
"""Between which modules of a program a pass goes wrong, where no claim has a cause yet.

places.py           which part of what one device has a tensor of a rank is
forward.py          a wrong forward pass: multipliers, dropout masks, rows of tables
attention.py        masks, positions, heads and scales that attention is called with
modules.py          the first wrong module; a weight without a gradient whose module has one
token_losses.py     a wrong loss, label by label
"""
