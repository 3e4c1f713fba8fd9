# SPDX-License-Identifier: Apache-2.0
"""The loop that writes: prompts first, then one token of each sequence after the other.

Stages of a pipeline work at the same time: the sequences of a rank are dealt out into as many
groups as there are stages, and while one stage has one group the next has another. The last stage
chooses tokens and tells all the others, so every rank knows which sequences have ended; what they
held of the cache goes back to the pool.

The choice is greedy, where each rank tells its likeliest id; of equal logits the lowest id is
taken, under every split. Or it is drawn: logits / temperature plus noise of Gumbel's distribution,
and the highest of these sums is a draw from the softmax (Gumbel, 1954; Maddison et al., "A*
Sampling", 2014, section 2). The noise is a function of (seed, number of the prompt, position, id),
so that neither the layout nor the other prompts of a batch change it.

Ranks hear of a wish to stop at different times, so that each tells it with its part: one that has
heard of it stops all.

Sent:  between stages [N, D] of a group forward, and its tokens back to every other stage; of a
       choice between tensor ranks: greedy an all-gather of 2 numbers for each sequence and of the
       wish; else one of its logits with the wish as one more.
Bytes: `generated_bytes` in `tests/inference/sent_bytes.py`.

Shape suffixes: B sequences, V ids, v ids of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from echelon.config.generation import Sampling
from echelon.core.plan import Plan
from echelon.inference.cache import CacheBatch, CachedSequence, next_batch, prompt_batch
from echelon.inference.operations import CacheOperations
from echelon.models.counter_random import make_key, uniform
from echelon.models.decoder import Decoder
from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.transport.collectives import Group, Pending


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """Say what is written: at most `max_tokens` after each prompt, chosen by `sampling`.

    A sequence ends before that where it has written `end`, which does not belong to the text.
    """

    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    end: int | None = None


@dataclass(slots=True, kw_only=True)
class _Group:
    """Hold the sequences that pass through the stages together."""

    live: list[CachedSequence]
    chosen: torch.Tensor | None = None
    """The next token of each, and whether to stop; on its way to here until `told` has ended."""
    told: Pending | None = None


class Generator:
    """Write after prompts, on one rank."""

    def __init__(
        self,
        plan: Plan,
        decoder: Decoder,
        groups: RankGroups,
        *,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        """Use the weights of `decoder`, and the cache that its operations have."""
        operations = decoder.operations
        assert isinstance(operations, CacheOperations)
        self._decoder, self._operations, self._groups = decoder, operations, groups
        # A token takes two sums a layer, each of a few kilobytes.
        groups.tensor.share_memory(operations.pieces)
        self._model, self._stop_requested = plan.model, stop_requested
        self._stages, self._stage = plan.mesh.pp, groups.pipe_forward.index
        self._sent: list[Pending] = []
        self._messages = 0

    @torch.inference_mode()
    def write(self, sequences: Sequence[CachedSequence], writing: Writing) -> bool:
        """Add tokens to every sequence, in place; every rank of a replica calls it with the same.

        Return whether it was asked to stop before their end.
        """
        count = min(self._stages, len(sequences))
        groups = [_Group(live=list(sequences[place::count])) for place in range(count)]
        stopping = False
        for step in range(writing.max_tokens):
            self._groups.recorder.mark(f"writing token {step + 1} of {writing.max_tokens}")
            for group in groups:
                stopping = self._settle(group, writing) or stopping
                if group.live and not stopping:
                    self._advance(group, writing.sampling, first=step == 0)
            if stopping or not any(group.live for group in groups):
                break
        for group in groups:
            stopping = self._settle(group, writing) or stopping
            for sequence in group.live:
                self._operations.caches.release(sequence)
        for pending in self._sent:
            pending.wait()
        self._sent.clear()
        return stopping

    def _advance(self, group: _Group, sampling: Sampling, *, first: bool) -> None:
        """Run this stage for a group, and choose its next tokens or begin to hear of them."""
        make = prompt_batch if first else next_batch
        batch = make(self._operations.caches, group.live)
        decoder, last = self._decoder, self._stage == self._stages - 1
        self._messages += 2
        x_ND = self._received(batch)
        x_ND = decoder.hidden(x_ND, batch)
        if not last:
            self._send(x_ND, self._stage + 1, "activation", self._messages)
            group.chosen = x_ND.new_empty(len(group.live) + 1, dtype=torch.int64)
            group.told = self._groups.pipe_backward.receive(
                group.chosen, self._stages - 1, name="token", tag=self._messages + 1
            )
            return
        x_BD = decoder.norm(x_ND if not batch.spans else x_ND[batch.last_B])
        logits_Bv = decoder.logits(x_BD)
        places = [(one.number, len(one.tokens)) for one in group.live]
        tensor = self._groups.tensor
        chosen, stop = choose_tokens(
            logits_Bv, places, sampling, self._model.vocab, tensor, stop=self._stop_requested()
        )
        group.chosen = torch.cat((chosen, stop[None]))
        for stage in range(self._stages - 1):
            self._send(group.chosen, stage, "token", self._messages + 1)

    def _settle(self, group: _Group, writing: Writing) -> bool:
        """Add the tokens that were chosen for a group; return whether to stop."""
        if group.chosen is None:
            return False
        if group.told is not None:
            group.told.wait()
        *tokens, stop = group.chosen.tolist()
        group.chosen = group.told = None
        live: list[CachedSequence] = []
        for sequence, token in zip(group.live, tokens, strict=True):
            if token != writing.end:
                sequence.tokens.append(token)
                live.append(sequence)
            else:
                sequence.ended = True
                self._operations.caches.release(sequence)
        group.live = live
        return bool(stop)

    def _received(self, batch: CacheBatch) -> torch.Tensor | None:
        """Return what the stage before made of the tokens of a batch; the first has none before."""
        if self._stage == 0:
            return None
        like = next(self._decoder.parameters())
        x_ND = like.new_empty(batch.tokens_N.numel(), self._model.hidden)
        self._groups.pipe_forward.receive(
            x_ND, self._stage - 1, name="activation", tag=self._messages
        ).wait()
        return x_ND

    def _send(self, tensor: torch.Tensor, stage: int, name: str, tag: int) -> None:
        """Begin to send to another stage; what has been sent before is let go."""
        one = self._groups
        group = one.pipe_forward if stage > self._stage else one.pipe_backward
        while len(self._sent) > 2 * self._stages * self._stages:
            self._sent.pop(0).wait()
        self._sent.append(group.send(tensor.contiguous(), stage, name=name, tag=tag))


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
