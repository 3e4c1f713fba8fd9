"""What counts of a push that not every server has, and how workers are found."""

from __future__ import annotations

from threading import Thread

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from echelon.core.event import NoEvents
from echelon.launch.process_group import Store, own_connection
from echelon.parallel.servers.links import PairLinks, WorkerLost, broken_pairs
from echelon.parallel.transport.recorder import Recorder
from tests.parallel.servers.test_server import served_plan


@pytest.fixture
def store() -> Store:
    """Return a store that lives as long as the test."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def links(store: Store) -> tuple[PairLinks, PairLinks]:
    """Return the links of two servers of two workers."""
    plan = served_plan(2, 2)
    first, second = (
        PairLinks(
            plan=plan,
            store=own_connection(store),
            recorder=Recorder(rank, NoEvents()),
            message_s=20.0,
        )
        for rank in (2, 3)
    )
    return first, second


@pytest.mark.parametrize("second_has_it", [True, False])
def test_all_servers_apply_a_push_or_none_does(
    links: tuple[PairLinks, PairLinks], second_has_it: bool
) -> None:
    """S07: the first waits until the second has the whole as well, or has lost the worker."""
    first, second = links
    found: dict[int, bool] = {}
    thread = Thread(target=lambda: found.update({0: first.applies(1, 0, 5)}))
    thread.start()
    thread.join(timeout=0.3)
    assert thread.is_alive()
    if second_has_it:
        found[1] = second.applies(1, 0, 5)
    else:
        second.drops(1, 0, 5)
        found[1] = False
    thread.join(timeout=20)

    assert found == {0: second_has_it, 1: second_has_it}


def test_the_first_verdict_counts(links: tuple[PairLinks, PairLinks]) -> None:
    """S07: who loses the worker after all have the whole applies it all the same."""
    first, second = links
    dropped = [first.drops(0, 0, 1), second.applies(0, 0, 1)]
    assert dropped == [None, False]
    found: list[bool] = []
    thread = Thread(target=lambda: found.append(first.applies(0, 0, 2)))
    thread.start()
    assert second.applies(0, 0, 2)
    thread.join(timeout=20)
    second.drops(0, 0, 2)
    assert first._verdict("push/0/0/2", "drop") == "apply"
    assert found == [True]


def test_what_all_have_answered_is_forgotten(links: tuple[PairLinks, PairLinks]) -> None:
    """S07: the store does not grow with the run."""
    first, second = links
    second.drops(0, 0, 1)
    first.applies(0, 0, 1)
    before = first.store.num_keys()
    first.forget(0, 0, 1)
    assert before - first.store.num_keys() == 2


def test_a_worker_is_found_by_its_attempt(links: tuple[PairLinks, PairLinks]) -> None:
    """S07: an attempt that a server waits for, or a later one; none once all is over."""
    first, _ = links
    assert first.attempt_of(1) is None
    assert first.wait_for(1, 0, lambda: True) is None
    first.store.set("here/1", "2")
    assert first.attempt_of(1) == 2
    assert first.wait_for(1, 1, lambda: False) == 2


def test_what_torch_says_of_a_broken_pair_is_a_lost_worker() -> None:
    """S07: nothing else is."""
    with pytest.raises(WorkerLost, match="reset by peer"), broken_pairs():
        raise RuntimeError("Connection reset by peer")
    with pytest.raises(ValueError, match="a bug"), broken_pairs():
        raise ValueError("a bug")
