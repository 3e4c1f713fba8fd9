# SPDX-License-Identifier: Apache-2.0
"""What ranks say of the activations between the parts of the model, as it travels to the prover.

Tensors go to a safetensors file, the rest to a table beside it (`proof/ranks.py` writes both).

Shape suffixes: n tokens that passed on a rank, W numbers of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from echelon.proof.subject import ReportedActivation


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedActivation:
    """Hold what passed one boundary on one rank in a step: see `subject.ReportedActivation`."""

    rank: int
    step: int
    name: str
    gradient: bool
    recomputed: bool
    tokens_n: torch.Tensor
    values_nW: torch.Tensor


_TOLD = ("step", "name", "gradient", "recomputed")


def observe_activations(
    rank: int, step: int, reported: Iterable[ReportedActivation]
) -> list[ObservedActivation]:
    """Return copies of what a subject says of its last step."""
    return [
        ObservedActivation(
            rank=rank,
            step=step,
            name=str(one.name),
            gradient=bool(one.gradient),
            recomputed=bool(one.recomputed),
            tokens_n=one.tokens_n.detach().cpu().clone(),
            values_nW=one.values_nW.detach().cpu().contiguous().clone(),
        )
        for one in reported
    ]


def activation_tables(activations: Sequence[ObservedActivation]) -> list[dict[str, Any]]:
    """Return what is written beside the tensors."""
    return [{key: getattr(one, key) for key in _TOLD} for one in activations]


def activation_tensors(activations: Sequence[ObservedActivation]) -> dict[str, torch.Tensor]:
    """Return the tensors to write, by a name for each."""
    tokens = {f"activation {i} tokens": one.tokens_n for i, one in enumerate(activations)}
    return tokens | {f"activation {i}": one.values_nW for i, one in enumerate(activations)}


def read_activations(
    rank: int, tables: Sequence[Mapping[str, Any]], tensors: Mapping[str, torch.Tensor]
) -> tuple[ObservedActivation, ...]:
    """Return what was written of a rank."""
    return tuple(
        ObservedActivation(
            rank=rank,
            tokens_n=tensors[f"activation {index} tokens"],
            values_nW=tensors[f"activation {index}"],
            **table,
        )
        for index, table in enumerate(tables)
    )
