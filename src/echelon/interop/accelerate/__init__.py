# SPDX-License-Identifier: Apache-2.0
"""Accelerate: its YAML, read and written.

read.py            mesh, type, strategy and units of FSDP, precision, the DeepSpeed plugin
write.py           a plan -> FSDP 2, the plugin, or plain data parallelism
abilities.py       what it can run; its words for our choices
keys.toml          keys that set nothing here; settings it has no word for
"""
