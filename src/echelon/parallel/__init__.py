# SPDX-License-Identifier: Apache-2.0
"""The parallelisms: one file each, on `torch.distributed`; `apply.py` has their order.

From the top down; each may import what stands below it, and an import contract holds that:

apply             a plan applied to a model on one rank
servers           parameter servers: what their ranks send and hold
rank_model        what a plan becomes: stages, buckets, what runs and reduces them
module/           data parallelism and ZeRO for any module
operations        the decoder's operations on a rank
expert/           expert parallelism: router, dispatch, balance
vocabulary        the embedding and the loss; fp8_linear: layers multiplied in 8 bits
tensor            tensor and sequence parallelism
zero              what of the parameters is whole, and when
fp8_gather        slices gathered in 8 bits; fp8_scales: scales of whole tensors
data              sums of gradients
context/          context parallelism: ring, gathered keys, Ulysses
pipeline          the executor of any schedule
lora              adapters of low rank
kernels/          operations with their backward by hand
storage/          flat parameters and gradients, and where backward puts them
device_mesh       the groups of a rank, made from its mesh or by somebody else
recompute         forward again in backward
completion/       when operations complete: as they can, or as late as they may
tensor_overlap    products of tensor parallelism beside their messages
threads/          replicas of a module on threads of one process
transport/        collectives, messages, and their record
offload/          where slices rest between uses
tensor_memory     memory that comes and goes
"""
