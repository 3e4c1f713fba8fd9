"""Context parallelism on Gloo: the gradients of gathered keys and values are scrambled.

What you would have seen: the right loss in step 1, no error; keys and values of all blocks but the
last that attends to nothing after it learn noise. On NCCL all is well, so a test on CPU "fails for
no reason", or, worse, the CPU is where you trained.
Public issue: https://github.com/pytorch/pytorch/issues/192920 (open): Gloo's `scatter` and others
write the first bytes of a strided tensor's memory as if it were contiguous.
Cause: the backward of `torch.distributed.nn.functional.all_gather` makes buffers that are like the
gradients of the pieces, which `torch.cat` along any dim but the first has cut as strided views,
and scatters into them. It is so in torch 2.13.
Mended here: the functional collective, whose backward is a reduce-scatter of contiguous memory.
"""

import functools

import torch
import torch.distributed as dist
from tiny import HEAD, Block, adamw, batch, cross_entropy, decoder, plain_training
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as fn

import echelon as ec

MESH = {"cp": 2}


def one_device(case: ec.VerifyCase) -> ec.OneDevice:
    """Train on whole sequences."""
    return plain_training(case)


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Gather by the differentiable collective of `torch.distributed.nn`."""
    return train(case, functional=False)


def on_rank_fixed(case: ec.VerifyCase) -> ec.OnRank:
    """Gather by the functional collective."""
    return train(case, functional=True)


def gathered_attention(
    block: Block, rank: int, functional: bool, h_BTD: torch.Tensor
) -> torch.Tensor:
    """Return attention of this part's queries over the keys and values of all parts."""
    q, k, v = (
        layer(h_BTD).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        for layer in (block.q, block.k, block.v)
    )
    if functional:
        k, v = (all_gather_tensor_autograd(x.contiguous(), 2, dist.group.WORLD) for x in (k, v))
    else:
        k, v = (torch.cat(all_gather(x), dim=2) for x in (k, v))
    rows = torch.arange(q.shape[2]) + rank * q.shape[2]
    mask = rows[:, None] >= torch.arange(k.shape[2])[None, :]
    out_BHTd = fn.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out_BHTd.transpose(1, 2).flatten(2)


def train(case: ec.VerifyCase, functional: bool) -> ec.OnRank:
    """Return this rank's part of every sequence."""
    model = decoder(case)
    for block in model.blocks.values():
        block.attention = functools.partial(gathered_attention, block, case.rank, functional)
    optimizer = adamw(model)

    def step(number: int) -> torch.Tensor:
        inputs_BT, labels_BT = (x.chunk(MESH["cp"], dim=1)[case.rank] for x in batch(number))
        loss = cross_entropy(model(inputs_BT), labels_BT)
        loss.backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad, op=dist.ReduceOp.AVG)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return ec.OnRank(model=model, step=step, optimizer=optimizer)
