# SPDX-License-Identifier: Apache-2.0
"""The parallelisms: one file each, on `torch.distributed`; `apply.py` has their order.

apply             a plan applied to a model on one rank
rank_model        what that gives: stages, buckets, what runs and reduces them
operations        the decoder's operations on a rank
tensor            tensor and sequence parallelism; vocabulary: the embedding and the loss
context/          context parallelism: ring, gathered keys, Ulysses
expert/           expert parallelism: router, dispatch, balance
pipeline          the executor of any schedule
recompute         forward again in backward
data, zero        sums of gradients; what of the parameters is whole, and when
module/           data parallelism and ZeRO for any module
buckets           flat parameters and gradients; gradients: where backward puts them
weights           initial values, shards
tensor_memory     memory that comes and goes; activation_meter: what activations take
completion/       when operations complete: as they can, or as late as they may
offload/          where slices rest between uses
kernels/          operations with their backward by hand
transport/        groups, collectives, messages, and their record
"""
