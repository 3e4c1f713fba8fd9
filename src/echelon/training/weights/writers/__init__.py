"""Weights of a checkpoint as the folders of other trainers, a tensor at a time.

formats.py       the formats by name: which names they have, what they refuse, what they need
archive.py       a file of torch.save whose tensors are filled in afterwards
distributed.py   torch.distributed.checkpoint: torchtitan, Megatron-core's torch_dist
universal.py     DeepSpeed: universal, with what Adam keeps
megatron.py      Megatron-core's folders
"""
