"""Memory in whole pages, and as many buffers of it as were asked for."""

from __future__ import annotations

import mmap

import pytest
import torch

from echelon.core.disk import PAGE_BYTES
from echelon.core.errors import EnvironmentProblem
from echelon.parallel.offload import host_memory as buffers
from echelon.parallel.offload.host_memory import BoundedBuffers, device_memory, plain_memory


@pytest.mark.parametrize("size", [1, PAGE_BYTES, PAGE_BYTES + 1])
def test_plain_memory_is_zero_and_starts_at_a_page(size: int) -> None:
    memory = plain_memory(size)
    assert (memory.dtype, memory.numel()) == (torch.uint8, size)
    assert memory.data_ptr() % mmap.PAGESIZE == 0
    assert not memory.any()
    memory.fill_(255)


def test_nothing_takes_no_page() -> None:
    assert plain_memory(0).numel() == 0
    assert device_memory(torch.device("cpu"))(3).tolist() == [0, 0, 0]


def test_a_host_without_memory_is_a_problem_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(size: int) -> object:
        raise MemoryError("none left")

    monkeypatch.setattr(buffers, "_Pages", full)
    with pytest.raises(EnvironmentProblem, match=r"allocating 2\.00 KiB .* none left") as caught:
        plain_memory(2048)
    assert caught.value.rules == ("offload-host-memory",)


def test_buffers_are_lent_again_and_grow_with_the_largest_set() -> None:
    made: list[int] = []

    def allocate(size: int) -> torch.Tensor:
        made.append(size)
        return torch.empty(size, dtype=torch.uint8)

    stock = BoundedBuffers[str](2, allocate)
    first = stock.take(10, "a")
    second = stock.take(20, "b")
    assert first is not None
    assert second is not None
    assert made == [PAGE_BYTES] * 2
    assert stock.take(10, "c") is None
    assert stock.num_bytes() == 2 * PAGE_BYTES
    stock.give_back(first)
    assert stock.take(10, "c") is first
    assert set(stock.owners.values()) == {"b", "c"}
    stock.give_back(second)
    larger = stock.take(3 * PAGE_BYTES, "d")
    assert larger is not None
    assert larger.nbytes == 3 * PAGE_BYTES
    stock.clear()
    assert stock.num_bytes() == 0


def test_a_buffer_knows_whose_tensors_are_in_it() -> None:
    stock = BoundedBuffers[str](2, plain_memory)
    buffers = [stock.take(8, owner) for owner in ("a", "b")]
    views = [one[4:8].view(torch.float32) for one in buffers if one is not None]
    assert [stock.owner_of([view]) for view in views] == ["a", "b"]
    assert stock.owner_of([torch.zeros(1)]) is None
    with pytest.raises(AssertionError, match="several fetches"):
        stock.owner_of(views)
