# SPDX-License-Identifier: Apache-2.0
"""Process groups that somebody else has made, as groups of ours."""

from __future__ import annotations

from functools import cache
from typing import cast

import torch.distributed as dist

from echelon.core.event import NoEvents
from echelon.parallel.transport.collectives import Group
from echelon.parallel.transport.communicator import Communicator
from echelon.parallel.transport.recorder import Recorder


def joined_group(group: dist.ProcessGroup | None) -> Group:
    """Return a process group, or that of all ranks, as a group that records nothing."""
    found = group or cast("dist.ProcessGroup", dist.group.WORLD)
    communicator, rank = _communicator(found), dist.get_rank()
    return Group("", communicator.ranks, rank, communicator, Recorder(rank, NoEvents()))


@cache
def _communicator(group: dist.ProcessGroup) -> Communicator:
    """Return the one communicator of a process group, which numbers its exchanges."""
    return Communicator(dist.get_process_group_ranks(group), group, group.group_name)
