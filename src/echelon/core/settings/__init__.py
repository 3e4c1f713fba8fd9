# SPDX-License-Identifier: Apache-2.0
"""Settings of run.toml as annotations of the fields that hold them.

value_types.py   a setting, and the kinds of values     list_types.py   kinds of lists, mixtures
configured.py    what a run file says of a field: the record's settings follow
"""
