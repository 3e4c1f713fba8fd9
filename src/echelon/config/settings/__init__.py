# SPDX-License-Identifier: Apache-2.0
"""The settings of run.toml.

schema.py        every setting, in the order of a run file
model_tables.py  settings of a model, of experts, of adapters
value_types.py   a setting, and the kinds of values     list_types.py   kinds of lists
"""
