"""The longest sequence fits, the next one does not, and positions and batches follow it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from echelon.cli.explain.command import search_schema
from echelon.cli.main import main
from echelon.config.entries import Entry
from echelon.config.load import load_job
from echelon.core.errors import ConfigError
from echelon.planner.answer.objectives import longest_facts
from echelon.planner.recommend.longest_sequence import longest_sequence
from echelon.planner.search.request import SearchRequest, request_with_settings
from echelon.planner.search.search import search
from tests.planner.requests import SMALL, small

LONGEST = "longest-sequence"
BATCH = ("batch.sequence_length=1024",)
OPEN = tuple(text for text in SMALL if text not in BATCH)


def _request(devices: int, *, memory_gb: float = 2.2, pins: Sequence[str] = ()) -> SearchRequest:
    return small(devices=devices, memory_gb=memory_gb, pins=pins, settings=OPEN, objective=LONGEST)


def _has_plan(request: SearchRequest) -> bool:
    return search(replace(request, top=1)).best is not None


@pytest.mark.quick("1-pins0", "4-pins2")
@pytest.mark.parametrize(
    ("devices", "pins"), [(1, ()), (4, ("tp=1", "pp=1")), (4, ("cp=1",)), (6, ())]
)
def test_the_longest_fits_and_the_next_does_not(devices: int, pins: Sequence[str]) -> None:
    request = _request(devices, memory_gb=3.0 if devices == 1 else 2.4, pins=pins)
    found = longest_sequence(request)
    assert found is not None
    assert found.too_long is not None
    assert found.tokens % (2 * devices) == 0
    assert found.tokens < found.too_long <= 2 * found.tokens
    step = 2 * devices * -(-1024 // (2 * devices))
    assert found.too_long - found.tokens <= max(step, found.tokens // 64)
    assert _has_plan(found.request)
    assert found.request.model.max_positions == max(found.tokens, found.positions)
    longer = request_with_settings(
        found.request,
        {"batch.sequence_length": found.too_long, "model.max_positions": found.too_long},
    )
    assert not _has_plan(longer)


def test_it_is_the_longest_of_all_multiples() -> None:
    """Halving leaves nothing out: no multiple up to twice the longest has a plan."""
    request = _request(2, memory_gb=1.9)
    found = longest_sequence(request)
    assert found is not None
    fit = [
        length
        for length in range(1024, 2 * found.tokens + 1, 1024)
        if _has_plan(
            request_with_settings(
                replace(request, objective="time"),
                {"batch.sequence_length": length, "model.max_positions": 2**20},
            )
        )
    ]
    assert max(fit) == found.tokens
    assert fit == [*range(1024, found.tokens + 1, 1024)]


def test_more_devices_have_longer_sequences() -> None:
    found = [longest_sequence(_request(devices, memory_gb=3.0)) for devices in (1, 2)]
    lengths = [one.tokens for one in found if one is not None]
    assert lengths == sorted(set(lengths))
    assert len(lengths) == 2


def test_learned_positions_end_the_search() -> None:
    request = small(settings=(*OPEN, "model.positions=learned"), objective=LONGEST)
    found = longest_sequence(request)
    assert found is not None
    assert (found.tokens, found.too_long) == (request.model.max_positions, None)
    facts = dict(longest_facts(found))
    assert "all positions" in facts["longest"]
    assert "untrained" in facts["positions"]


def test_a_batch_that_somebody_asked_for_stays_and_another_keeps_its_tokens() -> None:
    asked = longest_sequence(_request(2))
    assert asked is not None
    assert asked.request.mathematics.global_sequences == 24
    free = [text for text in OPEN if not text.startswith("batch.")]
    request = small(devices=2, memory_gb=2.2, settings=free, objective=LONGEST)
    layers = [
        {key: entry for key, entry in layer.items() if key != "batch.global_sequences"}
        for layer in request.layers
    ]
    default = replace(_entry_of(request), value=4096, source="default")
    request = replace(request, layers=({"batch.global_sequences": default}, *layers))
    found = longest_sequence(request)
    assert found is not None
    count = found.request.mathematics.global_sequences
    assert count & (count - 1) == 0
    tokens = request.mathematics.global_sequences * request.mathematics.sequence_length
    assert count == 1 or count * found.tokens <= tokens < 2 * count * found.tokens


def _entry_of(request: SearchRequest) -> Entry:
    return next(
        one["batch.global_sequences"] for one in request.layers if "batch.global_sequences" in one
    )


def test_a_length_that_is_said_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        small(settings=SMALL, objective=LONGEST)
    assert caught.value.rules == ("bad-argument",)


def test_the_command_prints_it_and_its_file_is_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run.toml")
    command = ["plan", "gpt2", "--cluster", "1xrtx4090", "--objective", LONGEST]
    assert main([*command, "--set", "model.positions=rope", "--json", "--out", run]) == 0
    told = json.loads(capsys.readouterr().out)
    Draft202012Validator(search_schema()).validate(told)  # type: ignore[reportUnknownMemberType]
    tokens = told["recommended"]["longest_sequence"]["tokens"]
    assert told["search"]["objective"] == LONGEST
    assert told["search"]["sequence_length"] == tokens > 1024
    plan = load_job(run).plan
    assert plan.mathematics.sequence_length == plan.model.max_positions == tokens
    assert main(command) == 0
    page = capsys.readouterr().out
    assert page.index("longest") < page.index("\nrun ")
    assert "1,024 tokens in a sequence" in page
    assert main([*command[:2], *command[4:]]) == 2
    assert "is about the plans of one cluster" in capsys.readouterr().err
