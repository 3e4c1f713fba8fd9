# SPDX-License-Identifier: Apache-2.0
"""The parallelisms: one file each, on `torch.distributed`; `apply.py` has their order.

From the top down; each may import what stands below it, and an import contract holds that:

threads/          replicas of a module on threads of one process
apply             a plan applied to a model on one rank
servers/          parameter servers: what their ranks send and hold
rank_model        what a plan becomes: stages, buckets, what runs and reduces them
module/           data parallelism and ZeRO for any module
operations        the decoder's operations on a rank
expert/           expert parallelism: router, dispatch, balance
context/          context parallelism: ring, gathered keys, Ulysses
vocabulary        the embedding and the loss; fp8_linear: linear layers multiplied in 8 bits
tensor            tensor and sequence parallelism, tensor_overlap its products beside messages
lora/             adapters of low rank
fp8_scales        scales of whole tensors in 8 bits
zero, data        what of the parameters is whole, and when; sums of gradients
fp8_gather        slices gathered in 8 bits
pipeline          the executor of any schedule
recompute         forward again in backward
kernels/          operations with their backward by hand
storage/          flat parameters and gradients, and where backward puts them
islands/          meetings of islands that may be lost
device_mesh       the groups of a rank, made from its mesh or by somebody else
completion/       when operations complete: as they can, or as late as they may
offload/          where slices rest between uses
transport/        groups, collectives, messages, and their record
tensor_memory     memory that comes and goes
"""
