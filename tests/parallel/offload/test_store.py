"""Places where slices rest: whatever the place, what is put is what is fetched, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.core.disk import PAGE_BYTES
from echelon.core.plan import OffloadTarget
from echelon.parallel.offload import OffloadPlace, OffloadStore, make_offload_store
from echelon.parallel.offload.copying_store import CopyingOffloadStore
from echelon.parallel.offload.file_store import FileOffloadStore
from echelon.parallel.offload.host_memory import CopyStreams
from echelon.parallel.offload.store import MemoryOffloadStore, Pool
from tests.walks import examples

CPU = torch.device("cpu")
HOMES: tuple[OffloadTarget, ...] = get_args(OffloadTarget)
COPIED = ("host-copied", "nvme-copied")
PLACES = (*HOMES, *COPIED, *(["host-cuda", "nvme-cuda"] if torch.cuda.is_available() else []))
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)


def noise(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return any bits at all: NaNs with a payload, infinities, negative zeros."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator).byte().view(dtype)


def bits(tensor: torch.Tensor) -> list[int]:
    """Return the bytes of a tensor, so that NaN equals itself."""
    return tensor.contiguous().view(torch.uint8).tolist()


def place(name: str, folder: Path) -> OffloadStore:
    """Return an empty place with two buffers.

    One that is "copied" keeps the device apart from the host, as with a GPU, on a CPU.
    """
    home, _, device = name.partition("-")
    if device == "copied":
        side = MemoryOffloadStore() if home == "host" else FileOffloadStore(folder, 0, 2)
        return CopyingOffloadStore(side, CPU, CopyStreams(), num_buffers=2)
    assert home in HOMES
    rests = OffloadPlace(target=home, folder=folder, rank=0, num_buffers=2)
    return make_offload_store(rests, torch.device(device or "cpu"))


@pytest.fixture(params=PLACES)
def rest(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OffloadStore]:
    """Give an empty place of each kind."""
    with closing(place(request.param, tmp_path)) as found:
        yield found


def test_what_was_added_is_zero(rest: OffloadStore) -> None:
    rest.add("a", 5000, torch.bfloat16)
    assert torch.equal(rest.view("a"), torch.zeros(5000, dtype=torch.bfloat16))
    (fetched,) = rest.fetch(["a"]).wait()
    assert torch.equal(fetched, torch.zeros(5000, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 7, PAGE_BYTES, 3 * PAGE_BYTES + 5])
def test_bits_survive(rest: OffloadStore, dtype: torch.dtype, numel: int) -> None:
    wanted = noise(numel, dtype, seed=numel)
    rest.add("before", 3, torch.float32)
    rest.add("a", numel, dtype)
    rest.add("behind", 3, torch.float32)
    (room,) = rest.fetch(["a"], read=False).wait()
    assert (room.dtype, room.shape) == (dtype, (numel,))
    room.copy_(wanted)
    rest.put(["a"], [room])
    rest.flush()
    assert bits(rest.view("a")) == bits(wanted)
    assert bits(rest.fetch(["a"]).wait()[0]) == bits(wanted)
    for other in ("before", "behind"):
        assert torch.equal(rest.view(other), torch.zeros(3))


def test_what_was_put_is_fetched_without_a_flush(rest: OffloadStore) -> None:
    rest.add("a", 100_000, torch.float32)
    for step in range(20):
        (values,) = rest.fetch(["a"]).wait()
        assert torch.equal(values, torch.full((100_000,), float(step)))
        values += 1
        rest.put(["a"], [values])


def test_a_view_is_written_through(rest: OffloadStore) -> None:
    rest.add("a", 10_000, torch.float32)
    view = rest.view("a")
    view.copy_(torch.arange(10_000))
    fetched = rest.fetch(["a"])
    (values,) = fetched.wait()
    assert torch.equal(values, torch.arange(10_000).float())
    values.mul_(2)
    rest.put(["a"], [values])
    rest.flush()
    assert torch.equal(view, 2 * torch.arange(10_000).float())


def test_tensors_of_the_caller_are_copied_when_put(rest: OffloadStore) -> None:
    rest.add("a", 10_000, torch.float32)
    mine = torch.ones(10_000)
    rest.put(["a"], [mine])
    mine.zero_()
    assert torch.equal(rest.view("a"), torch.ones(10_000))


def test_of_a_set_some_keys_may_be_put(rest: OffloadStore) -> None:
    for key in "abc":
        rest.add(key, 100, torch.float32)
    for _ in range(5):
        a, _, c = rest.fetch(["a", "b", "c"]).wait()
        a += 1
        c += 2
        rest.put(["c", "a"], [c, a])
    rest.flush()
    assert [float(rest.view(key)[0]) for key in "abc"] == [5.0, 0.0, 10.0]


def test_a_tensor_of_another_kind_is_a_bug_of_the_caller(rest: OffloadStore) -> None:
    rest.add("a", 10, torch.float32)
    with pytest.raises(AssertionError, match="already"):
        rest.add("a", 10, torch.float32)
    with pytest.raises(AssertionError, match="float64"):
        rest.put(["a"], [torch.zeros(10, dtype=torch.float64)])


def test_what_rests_is_counted_in_its_pool(rest: OffloadStore) -> None:
    rest.add("a", 1000, torch.float32)
    rest.add("b", 1000, torch.bfloat16)
    assert rest.held_bytes() == 6000
    live = rest.live_bytes()
    assert {pool: size for pool, size in live.items() if size} == {
        rest.pool: 2 * PAGE_BYTES if rest.pool == "nvme" else 6000
    }
    rest.close()
    rest.close()
    assert rest.held_bytes() == 0
    assert sum(rest.live_bytes().values()) == 0


def test_buffers_are_as_many_as_asked_for(tmp_path: Path) -> None:
    pools: dict[str, Pool] = {"nvme": "host", "nvme-copied": "device", "host-copied": "device"}
    for name, pool in pools.items():
        with closing(place(name, tmp_path)) as rest:
            for number in range(6):
                rest.add(str(number), PAGE_BYTES + number * PAGE_BYTES, torch.uint8)
            addresses: list[set[int]] = []
            for _ in range(4):
                addresses.append(set())
                ahead = rest.fetch(["0"])
                for number in range(6):
                    (values,) = ahead.wait()
                    addresses[-1].add(values.data_ptr())
                    ahead = rest.fetch([str((number + 1) % 6)])
                    rest.put([str(number)], [values])
                ahead.release()
                rest.flush()
            assert len(addresses[2] | addresses[3]) <= 2
            assert rest.live_bytes()[pool] <= 2 * 6 * PAGE_BYTES


SIZES = (1, 1000, PAGE_BYTES // 4, 5000)
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["update", "ahead", "read", "mine", "view"]),
        st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True),
    ),
    max_size=25,
)


@pytest.mark.quick("nvme", "host-copied", "none")
@pytest.mark.parametrize("name", PLACES)
@settings(deadline=None, max_examples=examples(40))
@given(actions=ACTIONS)
def test_any_order_of_use_gives_what_was_last_put(
    tmp_path_factory: pytest.TempPathFactory, name: str, actions: list[tuple[str, list[int]]]
) -> None:
    folder = tmp_path_factory.mktemp("offload")
    truth = {str(i): torch.zeros(size) for i, size in enumerate(SIZES)}
    with closing(place(name, folder)) as rest:
        for key, values in truth.items():
            rest.add(key, values.numel(), torch.float32)
        for number, (action, chosen) in enumerate(actions):
            keys = [str(i) for i in chosen]
            if action == "mine":
                for key in keys:
                    truth[key] = torch.full_like(truth[key], float(number))
                rest.put(keys, [truth[key] for key in keys])
            elif action == "view":
                for key in keys:
                    rest.view(key).add_(1)
                    truth[key] = truth[key] + 1
            else:
                fetched = rest.fetch(keys)
                ahead = rest.fetch(["0", "1"]) if action == "ahead" else None
                tensors = fetched.wait()
                for key, tensor in zip(keys, tensors, strict=True):
                    assert torch.equal(tensor, truth[key])
                if action == "read":
                    fetched.release()
                    fetched.release()
                    continue
                if ahead is not None:
                    ahead.release()
                for key, tensor in zip(keys, tensors, strict=True):
                    tensor.mul_(2).add_(number)
                    truth[key] = tensor.clone()
                rest.put(keys, tensors)
        rest.flush()
        for key, values in truth.items():
            assert torch.equal(rest.view(key), values)
