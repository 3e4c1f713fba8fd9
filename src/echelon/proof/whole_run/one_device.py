# SPDX-License-Identifier: Apache-2.0
"""The texts of a whole run, the run on one device, and judgements that all runs share.

Documents are made up, of lengths that take every rule of the trainer's data. An epoch ends
inside of the second step, and the last sample of either part is not full. A document ends where the
held-out part begins, so there is one place where a trainer may cut. The first sample of either part
has two ends of documents in a row and a third as its last token, and the next sample begins with an
end: two documents are empty. Prompts have ends at such places, too.

The run is the independent implementation (`proof/independent`): which samples a step reads, the
model, the optimizer. So what the trainer shares with its oracle elsewhere is seen here too.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from echelon.core.plan import Plan
from echelon.proof.causes.finding import Diagnosis, ProofFinding
from echelon.proof.claims.checks import Check, exact_check
from echelon.proof.claims.claims import ClaimResult, first_failure
from echelon.proof.independent.decoder import token_losses
from echelon.proof.independent.fp8 import Fp8Rules
from echelon.proof.independent.mixture import RouterState, first_state
from echelon.proof.independent.samples import document_starts, read_row, samples_of_step
from echelon.proof.independent.sequence import SequenceRun
from echelon.proof.independent.training import (
    IndependentStep,
    Values,
    forward,
    run_independent,
)
from echelon.proof.independent.weights import has_experts
from echelon.proof.subject import ProofBatch
from echelon.proof.verdict import ProofPass

_NO_LABEL = -100  # the label of a position that takes no part in the loss


@dataclass(frozen=True, slots=True, kw_only=True)
class OneDeviceRun:
    """Hold a run: its steps, and the validation loss after so many of them."""

    islands: tuple[tuple[IndependentStep, ...], ...]
    """The steps of each island of local SGD; those of the run, where there is one."""
    validations: Mapping[int, float]
    """The validation loss after so many steps."""
    weights: Values
    """The weights after the last step: of islands those that they agreed on."""

    @property
    def steps(self) -> tuple[IndependentStep, ...]:
        """Return the steps of the run, or of its first island."""
        return self.islands[0]


def run_on_one_device(
    plan: Plan, texts: RunTexts, num_steps: int, *, validated_after: Collection[int]
) -> OneDeviceRun:
    """Return the run of `plan` over the texts; it validates after so many steps, 0 among them."""
    steps = run_independent(plan, [batch_of_step(plan, texts, one) for one in range(num_steps)])
    layers = [block for block in range(plan.model.layers) if has_experts(plan.model, block)]
    states = [first_state(plan.model, layers), *(step.state_after for step in steps)]
    rules = [Fp8Rules.first(plan.mathematics.precision), *(step.fp8_after for step in steps)]
    values = [steps[0].before, *(step.after for step in steps)]
    tokens = texts.validation_tokens
    passes = {
        count: held_out_loss(plan, tokens, values[count], (states[count], rules[count]))
        for count in validated_after
    }
    return OneDeviceRun(
        islands=(steps,),
        validations={count: total / counted for count, (total, counted) in passes.items()},
        weights=values[-1],
    )


def batch_of_step(
    plan: Plan, texts: RunTexts, step: int, share: tuple[int, int] = (0, 1)
) -> ProofBatch:
    """Return what a step reads: of the samples, `share` (i, n) says the i-th of n equal parts."""
    numbers, tokens = plan.mathematics, texts.training_tokens
    num_samples = num_samples_of(plan, tokens)
    samples = samples_of_step(numbers.seed, step, numbers.global_sequences, num_samples)
    return _batch(plan, tokens, _part(samples, share))


def _part(samples: Sequence[int], share: tuple[int, int]) -> Sequence[int]:
    index, count = share
    size = len(samples) // count
    return samples[index * size : (index + 1) * size]


def num_samples_of(plan: Plan, tokens: Sequence[int]) -> int:
    """Return the samples of a text: each token but the first is the label of one position."""
    return -(-(len(tokens) - 1) // plan.mathematics.sequence_length)


def _batch(plan: Plan, tokens: Sequence[int], samples: Sequence[int]) -> ProofBatch:
    length = plan.mathematics.sequence_length
    rows = [read_row(tokens, sample, length, END_OF_DOCUMENT) for sample in samples]
    separate = plan.mathematics.documents == "separate"
    return ProofBatch(
        sample_ids=tuple(row.sample for row in rows),
        inputs_BT=torch.tensor([row.tokens for row in rows]),
        labels_BT=torch.tensor([row.labels for row in rows]),
        documents=tuple(row.documents for row in rows) if separate else None,
    )


@torch.no_grad()
def held_out_loss(
    plan: Plan,
    tokens: Sequence[int],
    values: Values,
    known: tuple[RouterState, Fp8Rules | None],
    share: tuple[int, int] = (0, 1),
) -> tuple[float, int]:
    """Return the sum of the losses of held-out tokens, with nothing dropped out, and their number.

    Of each batch, `share` (i, n) says the i-th of n equal parts.
    """
    plan = _without_dropout(plan)
    size = plan.mathematics.global_sequences
    num_batches = -(-num_samples_of(plan, tokens) // size)
    total, counted = 0.0, 0
    for number in range(num_batches):
        batch = _batch(plan, tokens, _part(range(number * size, (number + 1) * size), share))
        passed = forward(plan, values, batch, 0, *known)
        total += sum(float(part) for part, _ in passed.sums.values())
        counted += sum(count for _, count in passed.sums.values())
    return total, counted


@torch.no_grad()
def continuation(plan: Plan, run: OneDeviceRun, prompt: Sequence[int], count: int) -> list[int]:
    """Return the likeliest tokens after a prompt, one after the other; no expert drops any."""
    written = list(prompt)
    separate = plan.mathematics.documents == "separate"
    for _ in range(count):
        recent = written[-plan.model.max_positions :]
        sequence = text_run(
            plan,
            run.weights,
            run.steps[-1].state_after.biases,
            recent,
            documents=document_starts(recent, END_OF_DOCUMENT) if separate else (0,),
            # What is written has no step before it.
            fp8=Fp8Rules.first(plan.mathematics.precision),
        )
        written.append(int(logits_of(sequence)[-1].argmax()))
    return written[len(prompt) :]


@torch.no_grad()
def text_run(
    plan: Plan,
    weights: Values,
    biases: Mapping[int, torch.Tensor],
    tokens: list[int],
    *,
    documents: tuple[int, ...] = (0,),
    fp8: Fp8Rules | None = None,
) -> SequenceRun:
    """Return a text on its way through a model: nothing is dropped out, no expert drops a token."""
    sequence = SequenceRun(
        model=_without_dropout(plan).model,
        weights=weights,
        balance=replace(plan.mathematics.balance, capacity_factor=None),
        biases=biases,
        tokens=tokens,
        documents=documents,
        sample=0,
        step=0,
        seed=plan.mathematics.seed,
        fp8=fp8,
    )
    token_losses(sequence, [_NO_LABEL] * len(tokens))
    return sequence


def events_of_runs(folder: Path, num_runs: int, num_ranks: int) -> list[list[list[dict[str, Any]]]]:
    """Return the events of each rank of each run of a trainer, from the files of a folder.

    A rank without a file was lost with another rank, and has no events.
    """

    def events(run: int, rank: int) -> list[dict[str, Any]]:
        file = folder / f"run-{run}-rank-{rank:04d}.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else []

    return [[events(run, rank) for rank in range(num_ranks)] for run in range(num_runs)]


def equal_check(step: int, subject: str, value: Any, right: Any, position: int = 0) -> Check:
    """Compare two values exactly, NaN with NaN."""
    differs = value != right and f"{value}" != f"{right}"
    problem = f"{_short(value)} instead of {_short(right)}" * differs
    return exact_check(step, subject, problem, position)


def _short(value: Any) -> str:
    text = "nothing" if value is None else f"{value}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def pass_of(
    precision: str, claims: tuple[ClaimResult, ...], when: str = "in step {}", note: str = ""
) -> ProofPass:
    """Return the pass of a run's claims; the first failure, `when` it is, is its diagnosis."""
    first, diagnosis = first_failure(claims), None
    if first is not None:
        claim, failure = first
        says = f"{when.format(failure.step)}: {failure.detail or f'off by {failure.error:.2g}'}"
        finding = ProofFinding("", says, residual=failure.error)
        diagnosis = Diagnosis.of(claim, failure, finding, claim.statement)
    return ProofPass(precision=precision, claims=claims, diagnosis=diagnosis, note=note)


def logits_of(run: SequenceRun) -> torch.Tensor:
    """Return the logits of a text, [T, V]: the last that is noted of it."""
    return list(run.parts.values())[-1]


def _without_dropout(plan: Plan) -> Plan:
    model = replace(plan.model, dropout=0.0)
    return replace(plan, mathematics=replace(plan.mathematics, model=model))


END_OF_DOCUMENT = 256
"""The token id that the byte tokenizer puts after each document."""
VOCABULARY = 257
"""Token ids of the byte tokenizer."""
PROMPTS: tuple[tuple[int, ...], ...] = (
    (*b"the ",),
    (*b"a", END_OF_DOCUMENT, END_OF_DOCUMENT, *b"b"),
    (END_OF_DOCUMENT, *b"of"),
    (*b"so", END_OF_DOCUMENT),
    (*b"it", END_OF_DOCUMENT, END_OF_DOCUMENT),
)
"""Prompts: of one document, with two ends in a row, with an end first, and with one or two last."""
_LETTERS = "abcdefghijklmnopqrstuvwxyz "


def with_bytes(plan: Plan) -> Plan:
    """Return the plan with a vocabulary that has every byte, with the same remainder over `tp`."""
    tp = plan.mesh.tp
    vocab = VOCABULARY + (plan.model.vocab - VOCABULARY) % tp
    model = replace(plan.model, vocab=vocab)
    return replace(plan, mathematics=replace(plan.mathematics, model=model))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTexts:
    """Hold the documents of both parts, in order."""

    training: tuple[str, ...]
    validation: tuple[str, ...]

    @property
    def training_tokens(self) -> list[int]:
        """Return the token ids that are trained on."""
        return _tokens(self.training)

    @property
    def validation_tokens(self) -> list[int]:
        """Return the token ids that are held out."""
        return _tokens(self.validation)

    def argument(self, folder: str) -> dict[str, Any]:
        """Return the entries about data of the argument of a trainer's function."""
        held_out = len(self.validation_tokens)
        return {
            "folder": folder,
            "texts": [*self.training, *self.validation],
            "validation_fraction": held_out / (held_out + len(self.training_tokens)),
        }


def texts_for(plan: Plan) -> RunTexts:
    """Return documents of a few random letters, drawn by the seed of the plan."""
    mathematics = plan.mathematics
    length, count = mathematics.sequence_length, mathematics.global_sequences
    generator = random.Random(mathematics.seed)
    return RunTexts(
        training=_documents(_num_tokens(length, count + max(1, count // 2)), length, generator),
        validation=_documents(_num_tokens(length, count + 1), length, generator),
    )


def _num_tokens(length: int, num_samples: int) -> int:
    """Return tokens for so many samples, of which the last is half full."""
    return (num_samples - 1) * length + length // 2 + 1


def _documents(num_tokens: int, length: int, generator: random.Random) -> tuple[str, ...]:
    """Return documents that are `num_tokens` with their ends, some longer than a sequence."""
    sizes = [3, 1, length - 4, 1]
    left = num_tokens - sum(sizes)
    while left:
        size = min(left, generator.randint(2, 3 * length // 2))
        # A document of one token would be another end alone.
        sizes.append(left if left - size < 2 else size)
        left -= sizes[-1]
    return tuple("".join(generator.choices(_LETTERS, k=size - 1)) for size in sizes)


def _tokens(documents: tuple[str, ...]) -> list[int]:
    return [token for text in documents for token in (*text.encode(), END_OF_DOCUMENT)]
