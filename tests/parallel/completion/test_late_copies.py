"""Copies are done when their end is waited for, in the order of their direction."""

from __future__ import annotations

import torch

from echelon.parallel.completion.in_flight import InFlight
from echelon.parallel.completion.late_copies import LateCopyStreams
from echelon.parallel.completion.race import Race, RaceKind
from echelon.parallel.offload.activations import HostActivations


def test_a_copy_is_seen_when_its_end_is_waited_for() -> None:
    races: list[Race] = []
    streams = LateCopyStreams(InFlight(0, 0, races.append), "slices")
    source, (one, two) = torch.ones(2), torch.zeros(2, 2)
    first = streams.copy("up", [(one, source)], [streams.record_event()])
    second = streams.copy("up", [(two, source)], [])
    assert one.isnan().all()
    streams.wait_for(second)
    first.synchronize()
    assert one.tolist() == two.tolist() == [1.0, 1.0]
    assert not races


def test_a_copy_waits_for_the_marks_that_it_is_given() -> None:
    races: list[Race] = []
    streams = LateCopyStreams(InFlight(0, 0, races.append), "slices")
    host, back = torch.zeros(2), torch.zeros(2)
    down = streams.copy("down", [(host, torch.ones(2))], [])
    up = streams.copy("up", [(back, host)], [down])
    up.synchronize()
    assert back.tolist() == [1.0, 1.0]
    assert not races


def test_a_source_that_changes_under_a_copy_is_told() -> None:
    races: list[Race] = []
    streams = LateCopyStreams(InFlight(0, 0, races.append), "slices")
    source = torch.ones(2)
    mark = streams.copy("down", [(torch.zeros(2), source)], [])
    source.zero_()
    mark.synchronize()
    assert [(race.kind, race.operation) for race in races] == [
        (RaceKind.CHANGED, "copy down slices")
    ]


def test_activations_come_back_as_they_were() -> None:
    races: list[Race] = []
    streams = LateCopyStreams(InFlight(0, 0, races.append), "activations")
    host = HostActivations(lambda _: streams)
    forward_pass = object()
    kept = [torch.full((2,), float(one)) for one in range(3)]
    stored = [host.store(x, forward_pass) for x in kept]
    taken = [one.take().tolist() for one in stored[::-1]]
    assert taken == [[2.0, 2.0], [1.0, 1.0], [0.0, 0.0]]
    assert not races
