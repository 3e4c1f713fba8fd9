# SPDX-License-Identifier: Apache-2.0
"""The loop that writes: prompts first, then one token of each sequence after the other.

Stages of a pipeline work at the same time: the sequences of a rank are dealt out into as many
groups as there are stages, and while one stage has one group the next has another. The last stage
chooses tokens and tells all the others, so every rank knows which sequences have ended; what they
held of the cache goes back to the pool.

Sent:  between stages [N, D] of a group forward, and its tokens back to every other stage.
Bytes: `generated_bytes` in `cost/bytes/generate.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from echelon.config.generation import Sampling
from echelon.core.plan import Plan
from echelon.inference.batch import CacheBatch, next_batch, prompt_batch
from echelon.inference.cache import CachedSequence
from echelon.inference.choice import choose_tokens
from echelon.inference.operations import CacheOperations
from echelon.models.decoder import Decoder
from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.transport.collectives import Pending


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
        groups.tensor.share_memory()
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
