"""Operations on shapes: results as PyTorch makes them, kernels, memory and reads of the host."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from echelon.rehearsal.log import HostRead, RankLog
from echelon.rehearsal.shapes import META, ShapesOnly


def x(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=META)


OPERATIONS: list[Callable[[], object]] = [
    lambda: x(3, 4) * 2,
    lambda: x(3, 4, dtype=torch.bfloat16) + x(4),
    lambda: x(3, 4).t() @ x(3, 5),
    lambda: torch.mm(x(3, 4), x(4, 5), out=x(3, 5)),
    lambda: x(3, 4).mul_(x(4)),
    lambda: x(6, 8).topk(2, dim=-1),
    lambda: x(6, 8).sort(stable=True),
    lambda: x(4, 6).transpose(0, 1).contiguous(),
    lambda: x(4, 6).softmax(-1),
    lambda: x(4, 6).to(torch.bfloat16),
]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_remembered_is_what_pytorch_makes(operation: Callable[[], object]) -> None:
    with ShapesOnly(RankLog(0)) as shapes:
        made = [operation() for _ in range(2)]
    plain = operation()
    for one in made:
        both = (one, plain) if isinstance(plain, torch.Tensor) else zip(one, plain, strict=True)  # pyright: ignore[reportArgumentType]
        pairs = [both] if isinstance(plain, torch.Tensor) else both
        for ours, theirs in pairs:  # pyright: ignore[reportGeneralTypeIssues]
            assert (ours.shape, ours.stride(), ours.dtype, ours.device) == (
                theirs.shape,
                theirs.stride(),
                theirs.dtype,
                theirs.device,
            )
    (work,) = shapes.work.by_task.values()
    assert work.kernels % 2 == 0  # as many the second time as the first


def test_kernels_bytes_and_flops_are_counted_by_task() -> None:
    with ShapesOnly(RankLog(0)) as shapes:
        a, b = x(3, 4), x(4, 5)
        shapes.task = "F"
        a @ b
        a.view(12)
        a.mul_(2)
        torch.mm(a, b, out=x(3, 5))
    work = shapes.work.by_task["F"]
    assert "" not in shapes.work.by_task
    assert work.by_name == {"mm": 2, "mul_": 1}
    product = 4 * (3 * 4 + 4 * 5 + 3 * 5)
    assert work.bytes == 2 * product + 4 * 2 * 12  # in place is read and written
    assert work.flops == 2 * 2 * 3 * 4 * 5


def test_memory_lives_from_its_making_to_its_end() -> None:
    with ShapesOnly(RankLog(0)) as shapes:
        memory = shapes.memory
        with memory.within("activations"):
            a = x(10)
            view = a[2:]
            b = a + 1
        memory.is_for("messages", [b])
        assert memory.now() == {"activations": 40, "messages": 40}
        del a
        assert memory.now() == {"activations": 40, "messages": 40}
        del view
        assert memory.now() == {"messages": 40}
        assert memory.peak_bytes == 80
        memory.forget_peak()
        assert memory.peak_bytes == 40
        del b
        assert memory.now() == {}


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


def test_where_elements_decide_a_shape_nothing_is_made_up() -> None:
    with ShapesOnly(RankLog(0)), pytest.raises(NotImplementedError):
        x(4).nonzero()


def test_what_is_in_flight_is_watched() -> None:
    with ShapesOnly(RankLog(0)) as shapes:
        a, b = x(4), x(4)
        shapes.flight.begin(0, "gradients", [a], [b])
        a + 1
        assert not shapes.flight.misuses
        torch.add(a, 1, out=b)
        a.mul_(2)
        b.sum().item()
    assert [one.text.split(" at ")[0] for one in shapes.flight.misuses] == ["add", "mul_", "sum"]
