"""What rests away from the device: right in every order that a GPU may do copies and kernels in."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from random import Random

import pytest
import torch

from echelon.core.disk import PAGE_BYTES
from echelon.parallel.offload.copying_store import CopiedFetch, CopyingOffloadStore
from echelon.parallel.offload.file_store import FileOffloadStore
from echelon.parallel.offload.store import MemoryOffloadStore
from tests.parallel.offload.lazy_copy_streams import LazyCopyStreams

CPU = torch.device("cpu")
NUM_KEYS, NUM_SETS = 6, 60


def scaled(tensors: list[torch.Tensor], number: int) -> None:
    """Compute something that depends on what is there."""
    for tensor in tensors:
        tensor.mul_(2).add_(number).remainder_(101)


@pytest.mark.parametrize("home", ["host", "nvme"])
@pytest.mark.parametrize("seed", range(10))
def test_nothing_is_read_before_it_is_there(tmp_path: Path, home: str, seed: int) -> None:
    random, lanes = Random(seed), LazyCopyStreams(seed)
    truth = {str(key): torch.zeros(PAGE_BYTES + key) for key in range(NUM_KEYS)}
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    side = MemoryOffloadStore() if home == "host" else FileOffloadStore(tmp_path, 0, 3)
    with closing(CopyingOffloadStore(side, CPU, lanes, num_buffers=3)) as rest:
        for key, values in truth.items():
            rest.add(key, values.numel(), torch.float32)
        chosen = [random.sample(sorted(truth), 2) for _ in range(NUM_SETS)]
        ahead: CopiedFetch | None = None
        for number, keys in enumerate(chosen):
            found = ahead or rest.fetch(keys)
            tensors = found.wait()
            following = chosen[(number + 1) % NUM_SETS]
            # What is fetched ahead must not be what is about to change.
            ahead = None if set(following) & set(keys) else rest.fetch(following)
            for key, tensor in zip(keys, tensors, strict=True):
                wanted = truth[key].clone()
                lanes.compute(lambda t=tensor, w=wanted: seen.append((t.clone(), w)))
            if random.random() < 0.3:
                found.release()
                continue
            lanes.compute(lambda t=tensors, n=number: scaled(t, n))
            scaled([truth[key] for key in keys], number)
            rest.put(keys, tensors)
        if ahead is not None:
            ahead.release()
        lanes.compute(lambda: None).synchronize()
        if seed % 2:
            rest.flush()
        for key, values in truth.items():
            assert torch.equal(rest.view(key), values)
    assert len(seen) == 2 * NUM_SETS
    assert all(torch.equal(there, wanted) for there, wanted in seen)
