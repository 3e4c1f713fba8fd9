"""What ranks tell each other of a step, in the order in which the engine reads it."""

from __future__ import annotations

import torch

from echelon.config.load import load_job
from echelon.core.event import NoEvents
from echelon.parallel.device_mesh import rank_groups
from echelon.parallel.transport.recorder import Recorder
from echelon.training.engine import ToldByRank, agree, sum_of


def test_a_row_has_loss_squares_stop_wait_bytes_and_what_parts_tell() -> None:
    recorder = Recorder(0, NoEvents())
    recorder.waited_s = 0.25
    groups = rank_groups(
        load_job("nano", ("mesh.dp_replicate=1", "mesh.dp_shard=1")).plan, recorder
    )
    told = ToldByRank(
        loss=torch.tensor(1.5, dtype=torch.float32),
        norm_squared=4.0,
        stop_requested=True,
        used_bytes=7,
        by_parts=(0.5, 2.0),
    )
    rows = agree(told, groups, torch.device("cpu"))
    assert rows.dtype == torch.float64
    assert rows.tolist() == [[1.5, 4.0, 1.0, 0.25, 7.0, 0.5, 2.0]]


def test_losses_add_up_in_float64_behind_their_sum() -> None:
    found = sum_of({0: torch.tensor(1.0), 2: torch.tensor(2.5)})
    assert found.dtype == torch.float64
    assert float(found) == 3.5
    assert float(sum_of({})) == 0.0
