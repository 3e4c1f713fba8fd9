# SPDX-License-Identifier: Apache-2.0
"""`ec.threaded`: your own module on replicas, each in a thread of this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import nn

    from echelon.core.event import EventSink
    from echelon.parallel.threads.arguments import Place
    from echelon.parallel.threads.module import ThreadedModule

Replicated = TypeVar("Replicated", bound="nn.Module")


def threaded(
    module: Replicated,
    *,
    replicas: int | None = None,
    devices: Sequence[Place] | None = None,
    dim: int = 0,
    whole: Sequence[str] = (),
    events: EventSink | None = None,
) -> ThreadedModule[Replicated]:
    """Compute any module on replicas in threads of this process, as `torch.nn.DataParallel` did.

        model = ec.threaded(net, replicas=2)         # or devices=["cuda:0", "cuda:1"]
        model(x).square().mean().backward()          # x [B, ...] -> [B, ...]: the full batch
        optimizer.step()                             # over net.parameters(), as before

    Each forward pass cuts the tensors among its arguments along `dim` (in tuples, lists and dicts
    too), gives parameters and buffers to the replicas, runs them side by side, and returns their
    outputs joined along `dim`; backward adds the gradients of all up onto the parameters of
    `module`. Arguments named in `whole` go to each replica as they are. `replicas` are on the CPU,
    or on the first GPUs where the module is on one; `devices` says where each is, the first being
    where the module is. A batch need not be even, and with fewer rows than replicas the last ones
    rest. Of buffers, what the first replica changes stays, and what others change is lost.

    `with model.step():` replicates once for several passes. `model.sent` are the bytes that went
    through the first device; `events` takes them one by one. Raises ConfigError where something
    does not fit; what a replica raises is raised with a note that says which one it was.
    """
    from echelon.core.optional import optional_package

    optional_package("torch", extra="train", purpose="replicas on threads")
    from echelon.parallel.threads.arguments import devices_of, require_cut
    from echelon.parallel.threads.module import ThreadedModule

    found = devices_of(module, replicas, devices)
    require_cut(module, dim, whole)
    return ThreadedModule(module, found, dim=dim, whole=whole, sink=events)
