"""A plan on one rank alone, in this process."""

from __future__ import annotations

import torch

from echelon.core.event import NoEvents
from echelon.core.plan import Plan
from echelon.parallel.apply import apply_plan
from echelon.parallel.device_mesh import RankGroups, rank_groups
from echelon.parallel.rank_model import RankModel
from echelon.parallel.transport.recorder import Recorder

CPU = torch.device("cpu")


def alone(plan: Plan) -> tuple[RankModel, RankGroups]:
    """Return the model of a plan of one rank, with its groups."""
    groups = rank_groups(plan, Recorder(0, NoEvents()))
    return apply_plan(plan, groups, CPU), groups
