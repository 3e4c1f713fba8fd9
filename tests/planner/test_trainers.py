"""A search for a trainer proposes what its exporter can write, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from echelon.core.errors import ConfigError
from echelon.core.rulebook.planner import TRAINER_RUNS_PIN
from echelon.cost.lattice.frameworks import FRAMEWORKS
from echelon.planner.export.export import FOREIGN
from echelon.planner.export.settings import needed_settings
from echelon.planner.export.target import attempt
from echelon.planner.pins import PINS, pin_word
from echelon.planner.request import Aim, Request, make_request
from echelon.planner.search import search
from echelon.planner.trainers import ABILITIES, ALSO_CALLED
from tests.planner.requests import MIXTURE, SMALL

TRAINERS = ("megatron-core", "deepspeed", "torchtitan", "accelerate")


def for_trainer(trainer: str, pins: Sequence[str] = (), settings: Sequence[str] = SMALL) -> Request:
    """Return a request for plans of a trainer."""
    return make_request(
        "nano", cluster="8xh100", settings=settings, pins=pins, aim=Aim(trainer=trainer, top=3)
    )


@pytest.mark.parametrize("settings", [SMALL, MIXTURE], ids=["dense", "experts"])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_plan_of_a_search_is_exported(trainer: str, settings: Sequence[str]) -> None:
    found = 0
    last = "recompute=full" if trainer == "accelerate" else "pp=2"
    for pins in (("tp=2", "cp=2"), (last,)):
        request = for_trainer(trainer, pins, settings)
        target = FOREIGN[ABILITIES[request.trainer].tool]
        for one in search(request).ranked:
            assert one.plan is not None
            refusals = attempt(target, one.plan, needed_settings(one.plan)).refusals
            assert not refusals, (one.choice, refusals)
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
    assert ALSO_CALLED.get(trainer, trainer) in problem.message
    assert works in problem.works
    for text in problem.works:
        for_trainer(trainer, [text.removeprefix("--pin ")])


def test_every_generation_of_a_tool_keeps_to_what_the_tool_can_run() -> None:
    tools = ("megatron", "deepspeed", "fsdp")
    assert {name for name in FRAMEWORKS if name.startswith(tools)} == set(ABILITIES)
    assert set(ALSO_CALLED.values()) <= set(ABILITIES)


def test_limits_stay_with_pins() -> None:
    request = for_trainer("deepspeed", ["pp=2,4"])
    assert request.pins.of("schedule") == ("1f1b",)
    assert request.pins.without("pp").limits == request.pins.limits
    assert request.pins.having("zero", 1).of("schedule") == ("1f1b",)
    assert request.pins.having("schedule", "zb-v").of("schedule") == ()
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
