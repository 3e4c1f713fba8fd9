"""Copies between host and device: on a CPU done when they are asked for."""

from __future__ import annotations

import torch

from echelon.parallel.offload.host_memory import CompletedEvent, CopyStreams, make_copy_streams

CPU = torch.device("cpu")


def test_a_cpu_copies_at_once_in_the_order_given() -> None:
    streams = make_copy_streams(CPU)
    assert type(streams) is CopyStreams
    target = torch.zeros(2)
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    mark = streams.copy("down", [(target, first), (target[:1], second[:1])], [CompletedEvent()])
    assert target.tolist() == [3.0, 2.0]
    streams.record_use(target)
    streams.wait_for(mark)
    mark.synchronize()
    streams.record_event().synchronize()


def test_a_copy_casts_and_keeps_its_source() -> None:
    target, source = torch.zeros(2, dtype=torch.bfloat16), torch.tensor([0.5, -2.0])
    make_copy_streams(CPU).copy("up", [(target, source)], [])
    assert target.tolist() == source.tolist() == [0.5, -2.0]
