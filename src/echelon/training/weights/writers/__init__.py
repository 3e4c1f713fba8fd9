# SPDX-License-Identifier: Apache-2.0
"""Weights of a checkpoint as the folders of other trainers, a tensor at a time.

task.py          what is asked for, and done by one rank or several
shares.py        who writes which part, and how much threads hold
hugging_face.py  safetensors files
formats.py       the formats of trainers by name: whose names, what they refuse and need
archive.py       a file of torch.save whose tensors are filled in afterwards
distributed.py   torch.distributed.checkpoint: torchtitan, Megatron-core's torch_dist
universal.py     DeepSpeed: universal, with what Adam keeps
megatron.py      Megatron-core's folders
"""
