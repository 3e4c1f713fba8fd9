# SPDX-License-Identifier: Apache-2.0
"""Weights of a checkpoint as the folders of other trainers, a tensor at a time.

task.py          the request, safetensors files of Hugging Face, one rank or several
shares.py        who writes which part, and how much threads hold
formats.py       the formats of trainers by name: names, refusals, needs; DeepSpeed's universal
archive.py       a file of torch.save whose tensors are filled in afterwards
distributed.py   torch.distributed.checkpoint: torchtitan, Megatron-core's torch_dist
megatron.py      Megatron-core's folders
"""
