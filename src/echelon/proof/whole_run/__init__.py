# SPDX-License-Identifier: Apache-2.0
"""A whole run of the trainer beside one device: data, validation, a save and resume, what is read.

one_device.py     the texts that are read, and the same run on one device
written.py        the streams behind the text that the trained weights write, and what differs there
whole_run.py      start it, read what the ranks said, and judge
"""
