"""Layers and a cross-entropy on one device, and what ranks pass, made of it by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as fn

from echelon.proof.claims.checks import Check
from echelon.proof.evidence.captured import (
    CapturedPiece,
    CapturedRun,
    RankCapture,
    RankReport,
    Reference,
)
from echelon.proof.evidence.evidence import CapturedEvidence, float64_tolerance
from echelon.proof.evidence.mesh import NamedMesh
from echelon.proof.evidence.run import INITIAL, Passed, PassedTensor, ReferenceStep
from echelon.proof.verify.reference import logical_parameters
from echelon.proof.verify.watch import PassingWatch

SEQUENCES, TOKENS, INPUTS, HIDDEN, CLASSES = 4, 6, 5, 8, 7
IGNORED = -100

Change = Callable[[int, PassedTensor], torch.Tensor | None]
"""What a rank has of a tensor of one device; None where it has not seen it."""


class Layers(nn.Module):
    """Three layers, one after the other: `last` has a row for each class."""

    def __init__(self) -> None:
        """Make the weights."""
        super().__init__()
        self.first = nn.Linear(INPUTS, HIDDEN)
        self.second = nn.Linear(HIDDEN, HIDDEN)
        self.last = nn.Linear(HIDDEN, CLASSES, bias=False)

    def forward(self, x_BTI: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.last(self.second(self.first(x_BTI)))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and labels, of which one does not count."""
    made = torch.Generator().manual_seed(5)
    x_BTI = torch.randn(SEQUENCES, TOKENS, INPUTS, generator=made, dtype=torch.float64)
    labels_BT = torch.randint(CLASSES, (SEQUENCES, TOKENS), generator=made)
    labels_BT[1, 3] = IGNORED
    return x_BTI, labels_BT


def one_device() -> Reference:
    """Return a step of one device."""
    torch.manual_seed(3)
    model, (x_BTI, labels_BT) = Layers().double(), batch()
    watch = PassingWatch([(n, m) for n, m in model.named_modules() if n], lambda: 0)
    with watch.hooks():
        loss = fn.cross_entropy(model(x_BTI).flatten(0, 1), labels_BT.flatten())
        loss.backward()
    values = {name: one.detach().clone() for name, one in model.named_parameters()}
    gradients = {
        name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None
    }
    step = ReferenceStep(
        step=0,
        loss=float(loss.detach()),
        grad_norm=1.0,
        clip_norm=None,
        clip_scale=1.0,
        gradients=gradients,
        before=values,
        after=values,
        state={},
        rates={},
    )
    logical = logical_parameters(model)
    return Reference(logical=logical, initial=values, steps=(step,), passed=watch.passed)


def passed_on(reference: Reference, rank: int, change: Change) -> Passed:
    """Return what passes on a rank."""
    tensors = [
        replace(one, values=values)
        for one in reference.passed.tensors
        if (values := change(rank, one)) is not None
    ]
    return Passed(tensors=tensors)


def part(value: torch.Tensor, rank: int, dim: int, count: int = 2) -> torch.Tensor:
    """Return a rank's part along a dim."""
    return value.chunk(count, dim)[rank]


def evidence_of_passes(
    reference: Reference,
    ranks: Sequence[Passed],
    *,
    mesh: Mapping[str, int],
    cut: Mapping[str, int] | None = None,
    loss: float | Sequence[float] | None = None,
    pieces: Mapping[tuple[str, str], torch.Tensor] | None = None,
) -> CapturedEvidence:
    """Return evidence of ranks that hold all parameters, or slices of the `cut` ones by dim.

    `pieces` are values by kind and name, the same on all ranks; `loss` is what all tell, or each.
    """
    named = NamedMesh(mesh)
    captures: list[RankCapture] = []
    for rank, passed in enumerate(ranks):
        own = loss[rank] if isinstance(loss, Sequence) else loss
        capture = RankCapture(rank=rank, passed=passed, reports=[RankReport(loss=own)])
        held = {("parameters", name): value for name, value in reference.initial.items()}
        for (kind, name), value in {**held, **(pieces or {})}.items():
            elements = torch.arange(value.numel()).reshape(value.shape)
            if cut and name in cut:
                elements = part(elements, rank, cut[name], named.world_size)
            index = elements.reshape(-1)
            capture.pieces.append(
                CapturedPiece(
                    rank=rank,
                    kind=kind,
                    step=INITIAL if kind == "parameters" else 0,
                    name=name,
                    source=name,
                    index=index,
                    tensor=value.reshape(-1)[index],
                )
            )
        captures.append(capture)
    return CapturedEvidence(
        mesh=named,
        steps=reference.steps,
        initial=reference.initial,
        passed=reference.passed,
        run=CapturedRun(named, reference.logical, captures),
        tolerance=float64_tolerance(),
        dtype=torch.float64,
    )


LOSS = Check(0, "loss", 1.0, detail="wrong")
"""The failure of the loss of step 0."""
