# SPDX-License-Identifier: Apache-2.0
"""A whole run of the trainer beside one device: data, validation, a save and resume, what is read.

one_device.py     the texts that are read, and the same run on one device
whole_run.py      start it, read what the ranks said, and judge
"""
