"""A search for a trainer proposes what its exporter can write, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from echelon.core.errors import ConfigError
from echelon.core.rulebook.planner import TRAINER_RUNS_PIN
from echelon.cost.seconds.trainers import FRAMEWORKS
from echelon.interop.export import attempt_export
from echelon.interop.plan_settings import needed_settings
from echelon.interop.tools import ALSO_CALLED, TOOLS, abilities_of_trainer, tool_of_trainer
from echelon.planner.search.pins import PINS, pin_word
from echelon.planner.search.request import SearchAim, SearchRequest, make_request
from echelon.planner.search.search import search
from tests.planner.requests import MIXTURE, SMALL

TRAINERS = ("megatron-core", "deepspeed", "torchtitan", "accelerate")


def for_trainer(
    trainer: str, pins: Sequence[str] = (), settings: Sequence[str] = SMALL
) -> SearchRequest:
    """Return a request for plans of a trainer."""
    return make_request(
        "nano",
        cluster="8xh100",
        settings=settings,
        pins=pins,
        aim=SearchAim(trainer=trainer, top=3),
    )


@pytest.mark.quick("accelerate-dense", "torchtitan-dense", "deepspeed-experts")
@pytest.mark.parametrize("settings", [SMALL, MIXTURE], ids=["dense", "experts"])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_plan_of_a_search_is_exported(trainer: str, settings: Sequence[str]) -> None:
    found = 0
    last = "recompute=full" if trainer == "accelerate" else "pp=2"
    for pins in (("tp=2", "cp=2"), (last,)):
        request = for_trainer(trainer, pins, settings)
        tool = tool_of_trainer(request.trainer)
        assert tool is not None
        for one in search(request).ranked:
            assert one.plan is not None
            refusals = attempt_export(tool, one.plan, needed_settings(one.plan)).refusals
            assert not refusals, (one.candidate, refusals)
            found += 1
    assert found >= 4


@pytest.mark.parametrize(
    ("trainer", "pin", "works"),
    [
        ("megatron-core", "schedule=zb-v", "--pin schedule=1f1b"),
        ("megatron-core", "recompute=full/3", "--pin recompute=full"),
        ("deepspeed", "context=ring", "--pin context=ulysses"),
        ("torchtitan", "offload=host", "--pin offload=none"),
        ("accelerate", "pp=2", "--pin pp=1"),
    ],
)
def test_a_pin_that_a_trainer_cannot_run(trainer: str, pin: str, works: str) -> None:
    with pytest.raises(ConfigError) as caught:
        for_trainer(trainer, [pin])
    (problem,) = caught.value.problems
    assert problem.rule == TRAINER_RUNS_PIN.id == "trainer-runs-pin"
    assert f"{trainer} cannot run that" in problem.message
    assert works in problem.suggestions
    for text in problem.suggestions:
        for_trainer(trainer, [text.removeprefix("--pin ")])


def test_every_generation_of_a_tool_keeps_to_what_the_tool_can_run() -> None:
    tools = ("megatron", "deepspeed", "fsdp")
    generations = [name for tool in TOOLS.values() for name in tool.generations]
    assert len(generations) == len(set(generations))
    assert {name for name in FRAMEWORKS if name.startswith(tools)} == set(generations)
    assert set(ALSO_CALLED.values()) <= set(generations)


@pytest.mark.parametrize(
    ("trainer", "pins"),
    [
        ("fsdp2-compiled", ["pp=2"]),
        ("fsdp2", ["tp=2", "dp_replicate=4"]),
        ("megatron-core", ["pp=2"]),
        ("jax", ["pp=2"]),
        ("jax", ["pp=1"]),
    ],
)
def test_a_search_keeps_to_what_a_generation_can_run(trainer: str, pins: list[str]) -> None:
    request = for_trainer(trainer, pins)
    able = abilities_of_trainer(trainer)
    assert able is not None
    ranked = search(request).ranked
    for one in ranked:
        choice = one.candidate
        mesh = choice.mesh
        if mesh.pp > 1:
            assert able.schedules is not None
            assert choice.schedule in able.schedules
        assert able.allows_stages(layers=6, stages=mesh.pp * choice.virtual)
        assert able.allows_zero(
            choice.zero,
            **{a: getattr(mesh, a) for a in ("dp_replicate", "dp_shard", "pp", "cp", "tp")},
        )
        assert able.zero_stages is None or choice.zero in able.zero_stages
    # Copies of tensor ranks that share nothing out: torchtitan has none.
    assert bool(ranked) == ("dp_replicate=4" not in pins)


def test_limits_stay_with_pins() -> None:
    request = for_trainer("deepspeed", ["pp=2,4"])
    assert request.pins.values_of("schedule") == ("1f1b",)
    assert request.pins.without("pp").limits == request.pins.limits
    assert request.pins.having("zero", 1).values_of("schedule") == ("1f1b",)
    assert request.pins.having("schedule", "zb-v").values_of("schedule") == ()
    assert request.pins.texts == {"pp": "pp=2,4"}
    assert for_trainer("generic").pins.limits == {}


def test_words_of_pins_are_read_back() -> None:
    for name, words in {
        "recompute": ("none", "full", "full/3"),
        "sequence_parallel": ("on", "off"),
        "offload": ("host", "none"),
        "reshard": ("always", "never"),
        "zero": ("2",),
    }.items():
        for word in words:
            value = PINS[name](word)
            assert value is not None
            assert pin_word(name, value) == word
