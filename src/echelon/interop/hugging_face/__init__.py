# SPDX-License-Identifier: Apache-2.0
"""A trained model as the folder of Hugging Face that `from_pretrained` reads: all but its tensors.

folder.py           its config.json, found by reading it back; which tensors it has, in which files
adapters.py         adapters as PEFT keeps them
trainer_keys.py     what trainers on top of the Trainer say alike, and a file of DeepSpeed in theirs
"""
