# SPDX-License-Identifier: Apache-2.0
"""A whole run of the trainer beside one device: data, validation, a save and resume, what is read.

texts.py          documents that are written as data, and how they are cut
one_device.py     the same run on one device, by the independent implementation
whole_run.py      start it, read what the ranks said, and judge
"""
