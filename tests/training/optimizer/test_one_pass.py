"""An update in one pass where there is no GPU: the rule's own, with casts before and after it."""

from __future__ import annotations

import pytest
import torch

from echelon.core.plan import Optimizer
from echelon.models.piece_sizes import PieceSizes
from echelon.rehearsal.log import RankLog
from echelon.rehearsal.shapes import META, ShapesOnly
from echelon.training.optimizer.adamw import AdamW
from echelon.training.optimizer.one_pass import kernels_for
from echelon.training.optimizer.sgd import MomentumSgd
from echelon.training.optimizer.trained_ranges import (
    ElementRule,
    OnePassRule,
    UpdateSlices,
    update_elements,
)

LENGTH = 40
PARTS = [(slice(0, 17), True), (slice(20, 38), False)]
RULES: dict[str, type[AdamW] | type[MomentumSgd]] = {"adamw": AdamW, "sgd": MomentumSgd}


def updated(
    kind: str,
    gradients: torch.dtype,
    *,
    master: torch.dtype | None = None,
    scratch: bool = False,
    one_pass: bool,
    device: torch.device | None = None,
) -> list[torch.Tensor]:
    """Return values, target and state after an update, the third of all, and the gradient twice:
    as it is then, and as it was."""
    generator = torch.Generator().manual_seed(3)

    def random(dtype: torch.dtype) -> torch.Tensor:
        made = torch.rand(LENGTH, generator=generator).to(dtype)
        return made if device is None else made.to(device)

    values = random(torch.bfloat16 if master else torch.float32)
    target = random(master) if master else values
    state = [random(target.dtype) for _ in range(2 if kind == "adamw" else 1)]
    gradient = random(gradients)
    before = gradient.clone()
    rule: ElementRule = RULES[kind](Optimizer())
    rule.start_update(3)
    slices = UpdateSlices(
        gradient=gradient,
        values=values,
        target=target,
        state=state,
        scratch=scratch,
        pieces=PieceSizes(update_elements=7, gpu_update_elements=7),
        one_pass=one_pass,
    )
    update_elements(rule, slices, PARTS, rate=0.25, factor=0.5, weight_decay=0.1)
    return [values, target, *state, gradient, before]


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("gradients", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("master", [None, torch.float32, torch.float64])
@pytest.mark.parametrize("scratch", [False, True])
def test_on_a_cpu_it_is_the_update_of_many_passes(
    kind: str, gradients: torch.dtype, master: torch.dtype | None, scratch: bool
) -> None:
    """But for roundings: PyTorch fuses products and sums in its loops over the vectors of a CPU,
    and not for what elements are left."""
    first, second = (
        updated(kind, gradients, master=master, scratch=scratch, one_pass=one_pass)
        for one_pass in (False, True)
    )
    assert isinstance(RULES[kind](Optimizer()), OnePassRule)
    for one, other in zip(first[:-2], second[:-2], strict=True):
        off = 2.0**-22 if one.dtype == torch.float32 else torch.finfo(one.dtype).eps
        torch.testing.assert_close(one, other, rtol=off, atol=off)
    gradient, before = second[-2:]
    assert torch.equal(gradient, before)


@pytest.mark.parametrize("kind", RULES)
def test_a_rehearsal_counts_one_kernel_and_28_bytes_of_a_weight(kind: str) -> None:
    with ShapesOnly(RankLog(0)) as shapes:
        shapes.task = "update"
        updated(kind, torch.bfloat16, master=torch.float32, one_pass=True, device=META)
    work = shapes.work.by_task["update"]
    name = f"update_{kind}"
    assert work.by_name[name] == len(PARTS)
    moved = 28 if kind == "adamw" else 20  # one state less
    assert work.bytes_by_name[name] == moved * sum(part.stop - part.start for part, _ in PARTS)


def test_kernels_are_for_float32_on_a_gpu() -> None:
    assert kernels_for(torch.zeros(1)) is None
