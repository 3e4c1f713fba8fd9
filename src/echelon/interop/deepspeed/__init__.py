# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: its JSON, read and written.

read.py            degrees, ranks and batch, AutoEP, the stage and what it shares out, clipping
read_numbers.py    dtypes, loss scale, optimizer, scheduler
write.py           a plan -> its tables
abilities.py       what it can run; its words for our choices
keys.toml          keys that set nothing here; settings it has no word for
"""
