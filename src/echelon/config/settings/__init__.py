# SPDX-License-Identifier: Apache-2.0
"""The settings of run.toml.

schema.py        every setting, in the order of a run file
value_types.py   a setting, and the kinds of values
pipeline.py, context.py, experts.py   numbers that follow from settings of the same name
"""
