# SPDX-License-Identifier: Apache-2.0
"""A trained model as the folder of Hugging Face that `from_pretrained` reads: all but its tensors.

config_json.py      the config.json of a shape, found by reading it back
folder.py           which tensors the folder has, and in which files
"""
