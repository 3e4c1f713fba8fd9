# SPDX-License-Identifier: Apache-2.0
"""torchtitan: its TOML, read and written, and its Python, read.

read.py            flavor, mesh, FSDP 2, stages, batch, precision, optimizer, the run
python_config.py   a function that returns a configuration -> the keys of its TOML
write.py           a plan -> its tables
abilities.py       what it can run; its words for our choices; its models
keys.toml          keys that set nothing here; settings it has no word for
"""
