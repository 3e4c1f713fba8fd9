# SPDX-License-Identifier: Apache-2.0
"""The next token of each sequence, from logits of which every tensor rank has a part.

Greedy: each rank tells its likeliest id; of equal logits the lowest id is taken, under every split.
Drawn: logits / temperature plus noise of Gumbel's distribution, and the highest of these sums is a
draw from the softmax (Gumbel, 1954; Maddison et al., "A* Sampling", 2014, section 2). The noise is
a function of (seed, number of the prompt, position, id), so that neither the layout nor the other
prompts of a batch change it.

Ranks hear of a wish to stop at different times, so that each tells it with its part: one that has
heard of it stops all.

Sent:  greedy an all-gather of 2 numbers for each sequence and of the wish; else one of its logits
       with the wish as one more.
Bytes: `generated_bytes` in `cost/bytes/generate.py`.

Shape suffixes: B sequences, V ids, v ids of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from echelon.config.generation import Sampling
from echelon.models.counter_random import make_key, uniform
from echelon.parallel.transport.collectives import Group


def choose_tokens(
    logits_Bv: torch.Tensor,
    places: Sequence[tuple[int, int]],
    sampling: Sampling,
    vocab: int,
    group: Group,
    *,
    stop: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the next token of each sequence, int64 [B], and whether any rank wants to `stop`.

    Both are the same on all ranks of `group`. `places` are the number of each sequence and the
    position that its token will have.
    """
    if sampling.temperature == 0.0:
        return _likeliest(logits_Bv, vocab, group, stop)
    logits_BV, stops = _whole(logits_Bv, vocab, group, stop)
    logits_BV = _limited(logits_BV.double() / sampling.temperature, sampling)
    ids_V = torch.arange(vocab, device=logits_BV.device)
    noise_BV = torch.stack(
        [uniform(make_key("token", sampling.seed, *place), ids_V) for place in places]
    )
    return (logits_BV - (-noise_BV.log()).log()).max(-1).indices, stops


def _likeliest(
    logits_Bv: torch.Tensor, vocab: int, group: Group, stop: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    start, num_local = group.index * logits_Bv.shape[1], logits_Bv.shape[1]
    real = max(0, min(num_local, vocab - start))
    if group.size == 1:
        return logits_Bv[:, :real].max(-1).indices, _wish(stop, logits_Bv)
    # A rank that has nothing but padding has a least number, and an id beyond all others.
    best = logits_Bv.new_full((2, len(logits_Bv) + 1), float("-inf"), dtype=torch.float64)
    best[:, -1] = stop
    if real:
        highest = logits_Bv[:, :real].max(-1)
        best[0, :-1], best[1, :-1] = highest.values, highest.indices + start
    all_best = best.new_empty((group.size, *best.shape))
    group.all_gather(all_best.view(-1, best.shape[-1]), best, name="choice.likeliest").wait()
    values, ids = all_best[:, 0, :-1], all_best[:, 1, :-1]
    chosen = ids.masked_fill(values < values.amax(0), float("inf")).amin(0).long()
    return chosen, all_best[:, 0, -1].amax().long()


def _whole(
    logits_Bv: torch.Tensor, vocab: int, group: Group, stop: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of all ids, padding cut off, and whether any rank wants to stop."""
    if group.size == 1:
        return logits_Bv[:, :vocab], _wish(stop, logits_Bv)
    told = torch.cat((logits_Bv, logits_Bv.new_full((len(logits_Bv), 1), float(stop))), dim=1)
    parts = told.new_empty((group.size * len(told), told.shape[1]))
    group.all_gather(parts, told, name="choice.logits").wait()
    by_rank = parts.unflatten(0, (group.size, -1)).transpose(0, 1)
    return by_rank[:, :, :-1].flatten(1)[:, :vocab], by_rank[:, :, -1].amax().long()


def _wish(stop: bool, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(int(stop), device=like.device)


def _limited(logits_BV: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return the logits with those that may not be drawn at minus infinity."""
    if sampling.top_k is not None and sampling.top_k < logits_BV.shape[1]:
        least_B1 = logits_BV.topk(sampling.top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, float("-inf"))
    if sampling.top_p is not None:
        ordered_BV, order_BV = logits_BV.sort(descending=True, stable=True)
        weights_BV = ordered_BV.softmax(-1)
        # An id stays where those before it do not reach top_p: at least the first one does.
        beyond_BV = weights_BV.cumsum(-1) - weights_BV >= sampling.top_p
        logits_BV = logits_BV.masked_fill(
            torch.zeros_like(beyond_BV).scatter(-1, order_BV, beyond_BV), float("-inf")
        )
    return logits_BV
