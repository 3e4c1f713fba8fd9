"""Captures made by hand: a parameter of four elements on two ranks, without any process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from echelon.proof.evidence.captured import (
    CapturedPiece,
    CapturedRun,
    LogicalParameters,
    RankCapture,
    RankReport,
    Reference,
)
from echelon.proof.evidence.evidence import CapturedEvidence, float64_tolerance
from echelon.proof.evidence.mesh import NamedMesh
from echelon.proof.evidence.run import INITIAL, ReferenceStep

LOGICAL = LogicalParameters(shapes={"w": (4,), "v": (4,)}, aliases={})
BEFORE = {"w": torch.tensor([1.0, -2.0, 3.0, 0.5]), "v": torch.tensor([2.0, 1.0, -1.0, 4.0])}
GRADIENT = {"w": torch.tensor([0.3, 0.1, -0.7, 0.2]), "v": torch.tensor([-0.4, 0.9, 0.5, 0.25])}
AFTER = {name: BEFORE[name].double() - 0.1 * GRADIENT[name].double() for name in BEFORE}

Values = Mapping[tuple[int, str], Mapping[str, torch.Tensor]]
"""(rank, kind) -> values by name, all of them, or of a rank's half where they are two."""


def _updated(gradients: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return the values that wrong gradients make."""
    return {name: BEFORE[name].double() - 0.1 * g.double() for name, g in gradients.items()}


def reference(*, clip: float | None = None) -> Reference:
    norm = sum(float(one.double().square().sum()) for one in GRADIENT.values()) ** 0.5
    scale = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
    step = ReferenceStep(
        step=0,
        loss=2.0,
        grad_norm=norm,
        clip_norm=clip,
        clip_scale=scale,
        gradients={name: one.double() for name, one in GRADIENT.items()},
        before={name: one.double() for name, one in BEFORE.items()},
        after=_updated({name: scale * one for name, one in GRADIENT.items()}),
        state={},
        rates={name: (0.1, 0.0) for name in BEFORE},
    )
    return Reference(logical=LOGICAL, initial=step.before, steps=(step,))


def evidence_of(
    values: Values,
    *,
    clip: float | None = None,
    reports: Sequence[RankReport] = (RankReport(), RankReport()),
    mesh: Mapping[str, int] | None = None,
) -> CapturedEvidence:
    """Return evidence of two ranks that hold right tensors, except `values`.

    A wrong gradient makes a wrong parameter, unless `values` has that too.
    """
    named = NamedMesh(mesh or {"dp": 2})
    right = reference(clip=clip)
    captures: list[RankCapture] = []
    for rank in range(named.world_size):
        capture = RankCapture(rank=rank, framework="torch", reports=[reports[rank]])
        scale = right.steps[0].clip_scale
        kinds = {
            ("parameters", INITIAL): right.initial,
            ("gradients", 0): {n: g * scale for n, g in right.steps[0].gradients.items()},
            ("parameters", 0): {
                **right.steps[0].after,
                **_updated(values.get((rank, "gradients"), {})),
            },
        }
        told = {("gradients", 0): "gradients", ("parameters", 0): "parameters"}
        told[("parameters", INITIAL)] = "initial"
        kinds |= {("local", 0): {}} if (rank, "local") in values else {}
        told[("local", 0)] = "local"
        for (kind, step), whole in kinds.items():
            for name, value in {**whole, **values.get((rank, told[kind, step]), {})}.items():
                capture.pieces.append(
                    CapturedPiece(
                        rank=rank,
                        kind=kind,
                        step=step,
                        name=name,
                        source=name,
                        index=torch.arange(4),
                        tensor=value.double(),
                    )
                )
        captures.append(capture)
    return CapturedEvidence(
        mesh=named,
        steps=right.steps,
        run=CapturedRun(named, LOGICAL, captures),
        initial=right.initial,
        tolerance=float64_tolerance(),
        dtype=torch.float64,
    )
