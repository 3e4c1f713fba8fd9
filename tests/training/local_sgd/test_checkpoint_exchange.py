"""Objects that ranks tell each other through a store, and what breaks when one is lost."""

from __future__ import annotations

from threading import Thread

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from echelon.core.event import NoEvents
from echelon.parallel.transport.recorder import Recorder
from echelon.training.checkpoint.communicator import ExchangeBroken
from echelon.training.local_sgd.checkpoint import StoreExchange


def exchange(store: HashStore, rank: int, lost: set[int]) -> StoreExchange:
    recorder = Recorder(rank, NoEvents())
    return StoreExchange(store, (2, 3, 6), rank, recorder, lost.__contains__)


def test_every_rank_hears_all_in_their_order() -> None:
    store, found = HashStore(), dict[int, list[object]]()

    def work(rank: int) -> None:
        told = exchange(store, rank, set())
        assert (told.index, told.size) == ((2, 3, 6).index(rank), 3)
        found[rank] = [told.gather_objects((rank, number)) for number in range(4)]

    threads = [Thread(target=work, args=(rank,)) for rank in (2, 3, 6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(timeout=30)
    assert found[2] == found[3] == found[6]
    assert found[6][3] == [(2, 3), (3, 3), (6, 3)]


def test_it_breaks_for_all_at_the_object_that_never_comes() -> None:
    store = HashStore()
    told = {rank: exchange(store, rank, {3}) for rank in (2, 6)}
    # Rank 3 told its first object, and was lost.
    threads = [
        Thread(target=exchange(store, 3, set()).gather_objects, args=("last",)),
        *(Thread(target=told[rank].gather_objects, args=(rank,)) for rank in (2, 6)),
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join(timeout=30)
    for rank in (2, 6):
        with pytest.raises(ExchangeBroken):
            told[rank].gather_objects("more")
