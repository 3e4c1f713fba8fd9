"""Universal folders, as an engine of DeepSpeed looks for them."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.parallel.layouts import NANO
from tests.training.weights.test_export import drawn
from tests.training.weights.trainer_folders import stored_with_moments, written


def test_an_engine_finds_states_for_every_stage(tmp_path: Path) -> None:
    """Without moments it begins anew: the step is 0, and no file says another."""
    index = stored_with_moments(tmp_path / "checkpoint", drawn(NANO, 3), {}, step=4)
    out = written("deepspeed", NANO, tmp_path, index)
    tag = out / (out / "latest_universal").read_text()
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        assert torch.load(tag / name, weights_only=True)["global_steps"] == 0
    state = torch.load(tag / "zero/optimizer_state.pt", weights_only=True)
    assert state["optimizer_state_dict"]["state"][0]["step"] == 0
    assert not list(tag.rglob("step.pt"))
    assert not list(tag.rglob("exp_avg.pt"))
