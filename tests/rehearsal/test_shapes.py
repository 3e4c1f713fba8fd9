"""Operations on shapes: results as PyTorch makes them, kernels, memory and reads of the host."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from echelon.core.errors import ProofFailed
from echelon.rehearsal.order import HostRead, RankLog
from echelon.rehearsal.shapes import META, ShapesOnly


def x(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=META)


@pytest.mark.parametrize(
    ("read", "operation"),
    [
        (lambda t: t.sum().item(), "_local_scalar_dense"),
        (lambda t: float(t.sum()), "_local_scalar_dense"),
        (lambda t: t.cpu(), "_to_copy"),
        (lambda t: torch.empty(4).copy_(t), "copy_"),
        (lambda t: bool(t.any()), "_local_scalar_dense"),
    ],
)
def test_reads_of_the_host_are_written_down(
    read: Callable[[torch.Tensor], object], operation: str
) -> None:
    log = RankLog(0)
    with ShapesOnly(log) as shapes:
        shapes.task = "BW"
        read(x(4))
    (found,) = log.entries
    assert isinstance(found, HostRead)
    assert (found.operation.replace("is_nonzero", operation), found.task) == (operation, "BW")


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (lambda t: t.nonzero(), "nonzero"),
        (lambda t: t[t > 0], "nonzero|index"),
        (lambda t: t.masked_select(t > 0), "masked_select"),
        (lambda t: t.to(torch.int64).bincount(), "bincount"),
    ],
)
def test_where_elements_decide_a_shape_nothing_is_made_up(
    operation: Callable[[torch.Tensor], object], name: str
) -> None:
    said = f"what ({name}) makes .* in an action F.*rank 3"
    with ShapesOnly(RankLog(3)) as shapes:
        shapes.task, one = "F", x(4)
        with pytest.raises(ProofFailed, match=said) as told:
            operation(one)
    assert told.value.rules == ("rehearse-host-read",)


def test_what_is_in_flight_is_watched() -> None:
    with ShapesOnly(RankLog(0)) as shapes:
        a, b = x(4), x(4)
        shapes.flight.begin(0, "gradients", [a], [b])
        _ = a + 1
        assert not shapes.flight.misuses
        torch.add(a, 1, out=b)
        a.mul_(2)
        b.sum().item()
    assert [one.text.split(" at ")[0] for one in shapes.flight.misuses] == ["add", "mul_", "sum"]
