"""What completes as it can is what a rank had before there was a choice."""

from __future__ import annotations

from pathlib import Path

import torch

from echelon.core.event import NoEvents
from echelon.parallel.completion.completion import Completion
from echelon.parallel.offload import OffloadPlace
from echelon.parallel.offload.host_memory import CopyStreams
from echelon.parallel.offload.store import MemoryOffloadStore
from echelon.parallel.tensor_memory import BufferPool
from echelon.parallel.transport.collectives import Group
from echelon.parallel.transport.recorder import Recorder

CPU = torch.device("cpu")


def test_nothing_stands_between_the_engine_and_the_transport() -> None:
    completion = Completion()
    assert type(completion.group("tp", (2,), None, Recorder(2, NoEvents()))) is Group
    assert type(completion.buffer_pool(CPU)) is BufferPool
    assert completion.buffer_pool(torch.device("cuda")) is None
    place = OffloadPlace(target="host", folder=Path(), rank=0, num_buffers=1)
    store = completion.offload_store(place, CPU)
    assert type(store) is MemoryOffloadStore
    assert type(completion.copy_streams(CPU)) is CopyStreams
    with completion.watching(), completion.observing():
        assert completion.num_operations == 0
    completion.close()
