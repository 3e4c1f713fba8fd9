# SPDX-License-Identifier: Apache-2.0
"""torchtitan: its TOML, read and written, and its Python, read.

read.py            flavor, degrees, data ranks, FSDP 2, recompute, the run
read_pipeline.py   schedule and stages
read_numbers.py    batch, precision, optimizer, learning rate
python_config.py   a function that returns a configuration -> the keys of its TOML
write.py           a plan -> its tables
flavors.py         its models
abilities.py       what it can run; its words for our choices
keys.toml          keys that set nothing here; settings it has no word for
"""
