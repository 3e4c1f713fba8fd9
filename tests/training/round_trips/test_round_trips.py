"""Every family: from transformers, trained at a split layout, and back, where training goes on."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch

from echelon.config.model.architectures.table import ARCHITECTURES
from echelon.core.errors import EchelonError
from echelon.launch.local.supervisor import RankPool
from tests.config.model.architectures.families import CONFIGURATIONS
from tests.training.round_trips.draws import DRAWS, draw_configuration
from tests.training.round_trips.layouts import ADAMW
from tests.training.round_trips.theirs import be_quiet, make_model
from tests.training.round_trips.trip import Findings, Place, Trip, job_of, small_text, take
from tests.walks import shortened

SPLITS = {
    "dp2 x tp2": ("mesh.dp_shard=2", "mesh.tp=2", "zero.stage=3"),
    "pp2": ("mesh.pp=2", "batch.global_sequences=4"),
    "cp2": ("mesh.cp=2", "zero.stage=1"),
    "dp2 x tp2 x pp2": ("mesh.dp_replicate=2", "mesh.tp=2", "mesh.pp=2"),
    "dp2 x ep2": ("mesh.dp_shard=2", "mesh.ep=2", "zero.stage=2"),
    "dp2 x cp2": ("mesh.dp_shard=2", "mesh.cp=2", "context.kind=ulysses", "zero.stage=3"),
}
BATCH = ("batch.microbatch_sequences=1", "batch.global_sequences=8")
SEEDS = {"llama": 3, "deepseek_v3": 9}
"""Of the configurations, where it isn't 0: those with something of each kind."""
QUICK = ("llama", "qwen3_moe")
FIRST = {"llama": "dp2 x tp2", "qwen3_moe": "dp2 x ep2"}
"""Where those begin, of which fewer than eight ranks are asked."""


@pytest.fixture(autouse=True)
def quiet() -> None:
    be_quiet()


def layouts(place: Place, hub: Path, kind: str) -> list[tuple[str, ...]]:
    """Return two layouts that rules let a family have, each family beginning with another one."""
    names = [*SPLITS]
    first = sorted(ARCHITECTURES).index(kind) % len(names)
    first = names.index(FIRST[kind]) if kind in FIRST else first
    found: list[tuple[str, ...]] = []
    for name in (*names[first:], *names[:first]):
        keys = {setting.partition("=")[0] for setting in SPLITS[name]}
        batch = [one for one in BATCH if one.partition("=")[0] not in keys]
        try:
            job_of(place, hub, (*batch, *SPLITS[name]), ADAMW)
        except EchelonError:
            continue
        found.append((*batch, *SPLITS[name]))
    assert len(found) >= 2, f"{kind} can be split in {len(found)} ways"
    return found[:2]


@pytest.mark.quick("llama")
@pytest.mark.parametrize("kind", shortened(sorted(ARCHITECTURES), lambda kind: kind in QUICK))
def test_a_family_goes_there_and_back(kind: str, rank_pool: RankPool, tmp_path: Path) -> None:
    settings = draw_configuration(Random(SEEDS.get(kind, 0)), kind)
    place = Place(folder=tmp_path, text=small_text(tmp_path), pool=rank_pool)
    make_model(kind, settings, tmp_path / "before")
    layout, onwards = layouts(place, tmp_path / "before", kind)
    trip = Trip(
        kind=kind,
        settings=settings,
        updates=ADAMW,
        layout=layout,
        onwards=onwards,
        model_type=kind,
        file_bytes=20_000,
    )
    found = take(trip, place)
    assert not found.problems, found.problems
    wanted = {"logits before", "losses", "bits", "logits after", "tensors", "losses on", "bits on"}
    assert found.worst.keys() == wanted


def test_each_architecture_has_configurations() -> None:
    assert DRAWS.keys() <= ARCHITECTURES.keys()
    assert ARCHITECTURES.keys() <= {*DRAWS, *(kind for kind, _ in CONFIGURATIONS.values())}


def test_what_differs_is_told() -> None:
    found = Findings()
    found.compare("losses", "loss of step 1", [1.0], [1.0 + 1e-6], 1e-5)
    assert not found.problems
    found.compare("losses", "loss of step 2", [1.0], [1.1], 1e-5)
    found.compare("bits", "a bias", torch.ones(2), torch.full((2,), float("nan")), 0.0)
    found.compare("bits", "a weight", torch.ones(2), torch.ones(3), 0.0)
    assert [one.partition(":")[0] for one in found.problems] == [
        "loss of step 2",
        "a bias",
        "a weight",
    ]
