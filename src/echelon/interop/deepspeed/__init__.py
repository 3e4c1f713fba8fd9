# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: its JSON, read and written.

read.py            degrees, ranks and batch, AutoEP, clipping, and what is left
read_zero.py       the stage, buckets, units of stage 3, where slices are kept
read_numbers.py    dtypes, loss scale, optimizer, scheduler
write.py           a plan -> its tables
abilities.py       what it can run; its words for our choices
keys.toml          keys that set nothing here; settings it has no word for
"""
