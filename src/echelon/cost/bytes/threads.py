# SPDX-License-Identifier: Apache-2.0
"""Replicas of a module on threads of one process: the rows of each, and the bytes of a step.

Named after `torch.nn.DataParallel`, which has the same seven steps: scatter the batch, replicate
the module, forward in threads, gather the outputs, the loss on the primary, backward in threads,
sum of the gradients onto the primary. The first replica is the primary, which is the module itself;
what the others hold lasts for a step.

A step is what lies between two changes of the parameters. In a pass A <= N of the replicas have
rows, the primary the share q of them; nothing needs to be even.

    replicate        once a step      (A-1) (P + U)           parameters and buffers
    scatter          each pass        (1-q) X + (A-1) W       inputs that are cut, and whole ones
    gather           each pass        (1-q) Y + (A-1) Z       outputs by rows, and one of each
    seeds            each backward    (1-q) Y + (A-1) Z       derivatives of those that have one
    gradients        each backward    (A-1) D                 onto the primary
    input gradients  each backward    (1-q) X + (A-1) W       of inputs that have one

All of it goes through the primary, where ranks of a ring send 2 (N-1)/N of the gradients each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from echelon.cost.bytes.terms import SentTerm

_SOURCE = "PyTorch, torch.nn.DataParallel; Li et al., PyTorch Distributed, 2020, section 2.2"

THREADS_AXIS = "threads"
"""Under which axis events and formulas have what goes through the primary."""


def replica_rows(rows: int, replicas: int) -> tuple[int, ...]:
    """Return how many of `rows` each replica takes that has any, the primary first.

    All but the last take as many, as `torch.chunk` cuts: 10 rows for 4 are 3, 3, 3, 1, and 5 are 2,
    2, 1, with a replica that has none. No rows are the primary's.
    """
    each = -(-rows // replicas)
    if not each:
        return (0,)
    return tuple(min(each, rows - first) for first in range(0, rows, each))


@dataclass(frozen=True, slots=True, kw_only=True)
class ByRows:
    """Hold bytes of tensors, all replicas together where they are cut, else of one replica."""

    cut: int = 0
    each: int = 0

    def elsewhere(self, rows: Sequence[int]) -> int:
        """Return the bytes that are not the primary's, of replicas with so many rows."""
        share = self.cut * sum(rows[1:]) // sum(rows) if sum(rows) else 0
        return share + (len(rows) - 1) * self.each


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadedPass:
    """Hold what one forward pass of a module is given and gives, and a backward pass of it."""

    rows: int
    inputs: ByRows
    outputs: ByRows
    seeds: ByRows = field(default_factory=ByRows)
    gradients: int = 0
    input_gradients: ByRows = field(default_factory=ByRows)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadedStep:
    """Hold a step of a module of your own on threads, between two changes of its parameters."""

    replicas: int
    state: int
    """Bytes of parameters and buffers, each counted once: P + U."""
    passes: Sequence[ThreadedPass]


def step_bytes(step: ThreadedStep) -> tuple[SentTerm, ...]:
    """Return the terms of what goes through the primary in a step of a module of your own."""
    rows = [replica_rows(one.rows, step.replicas) for one in step.passes]
    others = [len(one) - 1 for one in rows]
    pairs = list(zip(step.passes, rows, strict=True))

    def term(name: str, sent: int, formula: str) -> SentTerm:
        return SentTerm(axis=THREADS_AXIS, name=name, each=sent, formula=formula, source=_SOURCE)

    return (
        term("replicate", max(others, default=0) * step.state, "(A-1) (P + U)"),
        term("scatter", sum(p.inputs.elsewhere(n) for p, n in pairs), "(1-q) X + (A-1) W"),
        term("gather", sum(p.outputs.elsewhere(n) for p, n in pairs), "(1-q) Y + (A-1) Z"),
        term("seeds", sum(p.seeds.elsewhere(n) for p, n in pairs), "(1-q) Y + (A-1) Z"),
        term(
            "gradients",
            sum(p.gradients * n for p, n in zip(step.passes, others, strict=True)),
            "(A-1) D",
        ),
        term(
            "input gradients",
            sum(p.input_gradients.elsewhere(n) for p, n in pairs),
            "(1-q) X + (A-1) W",
        ),
    )
