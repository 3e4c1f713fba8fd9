"""Context parallelism: labels shifted after the split lose the token at every boundary.

What you would have seen: nearly the right loss (one label in T/cp is not trained on) and a curve
that nobody would question; the model never learns what follows a boundary.
Public thread: https://github.com/huggingface/transformers/pull/36607 (March 2025, merged: the
model's loss now takes labels that are shifted already).
Cause: the model shifts labels itself, inside its part of the sequence; the first label of the next
part belongs to the last token of this one, and becomes an ignored one.
Made here in few lines: keys and values are gathered, each rank has the queries of its part.
Mended here: labels are shifted before the sequence is split.
"""

import functools

import torch
import torch.distributed as dist
from tiny import HEAD, IGNORED, LENGTH, Block, adamw, batch, cross_entropy, decoder, plain_training
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.nn import functional as fn

import echelon as ec

MESH = {"cp": 2}


def one_device(case: ec.VerifyCase) -> ec.OneDevice:
    """Train on whole sequences."""
    return plain_training(case)


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Split, then shift."""
    return train(case, shift_first=False)


def on_rank_fixed(case: ec.VerifyCase) -> ec.OnRank:
    """Shift, then split."""
    return train(case, shift_first=True)


def gathered_attention(block: Block, rank: int, h_BTD: torch.Tensor) -> torch.Tensor:
    """Return attention of this part's queries over the keys and values of all parts."""
    q, k, v = (
        layer(h_BTD).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        for layer in (block.q, block.k, block.v)
    )
    k, v = (all_gather_tensor_autograd(x.contiguous(), 2, dist.group.WORLD) for x in (k, v))
    rows = torch.arange(q.shape[2]) + rank * q.shape[2]
    mask = rows[:, None] >= torch.arange(k.shape[2])[None, :]
    out_BHTd = fn.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out_BHTd.transpose(1, 2).flatten(2)


def shifted(tokens_BT: torch.Tensor) -> torch.Tensor:
    """Return the labels of tokens: the next one, and none after the last."""
    return fn.pad(tokens_BT[:, 1:], (0, 1), value=IGNORED)


def train(case: ec.VerifyCase, shift_first: bool) -> ec.OnRank:
    """Return this rank's part of every sequence."""
    model = decoder(case)
    for block in model.blocks.values():
        block.attention = functools.partial(gathered_attention, block, case.rank)
    optimizer = adamw(model)
    part = LENGTH // MESH["cp"]
    mine = slice(case.rank * part, (case.rank + 1) * part)

    def step(number: int) -> dict[str, torch.Tensor]:
        inputs_BT, labels_BT = batch(number)
        if shift_first:
            inputs_BT, labels_BT = inputs_BT[:, mine], labels_BT[:, mine]
        else:
            # What the model sees is T + 1 tokens, of which the last one is a label only.
            inputs_BT = inputs_BT[:, mine]
            labels_BT = shifted(inputs_BT)
            if case.rank == MESH["cp"] - 1:
                labels_BT[:, -1] = batch(number)[1][:, -1]
        tokens = (labels_BT != IGNORED).sum()
        everyone = tokens.clone()
        dist.all_reduce(everyone)
        loss = cross_entropy(model(inputs_BT), labels_BT, "sum") / everyone
        loss.backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss.detach() * everyone / tokens, "tokens": tokens}

    return ec.OnRank(model=model, step=step, optimizer=optimizer)
