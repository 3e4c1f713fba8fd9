# SPDX-License-Identifier: Apache-2.0
"""NeMo: the YAML of its Megatron models, read as the command of Megatron-LM that it stands for.

read.py        its keys -> flags of Megatron-LM, and what they became under their own names
keys.toml      keys that are flags, keys that set nothing here
"""
