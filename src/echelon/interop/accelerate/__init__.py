# SPDX-License-Identifier: Apache-2.0
"""Accelerate: its YAML, read and written.

read.py            type, strategy of FSDP, precision, recompute, the DeepSpeed plugin
read_mesh.py       parallelism_config and processes -> the mesh
read_units.py      FSDP: what is gathered together, prefetch, offload
write.py           a plan -> FSDP 2, the plugin, or plain data parallelism
abilities.py       what it can run; its words for our choices
keys.toml          keys that set nothing here; settings it has no word for
"""
