"""The answer of a search as one object, of the schema that is published."""

from __future__ import annotations

import json

import pytest
from jsonschema import Draft202012Validator, ValidationError

from echelon.cli.explain.command import search_schema
from echelon.cli.main import main
from echelon.core.plan import Plan

FAST = ["plan", "nano", "--cluster", "8xh100"]


def check(value: object) -> None:
    """Raise where an object is not of the published schema."""
    Draft202012Validator(search_schema()).validate(value)  # type: ignore[reportUnknownMemberType]


def test_json_is_one_object_of_the_published_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FAST, "--json", "--objective", "front", "--pin", "devices=8"]) == 0
    result = json.loads(capsys.readouterr().out)
    check(result)
    found = result["search"]
    assert found["seen"] >= found["computed"] > 0
    assert 3 <= len(found["plans"]) <= 10
    for one in found["plans"]:
        plan = Plan.from_json(json.dumps(one["plan"]))
        assert plan.mesh.world_size == one["devices"] == 8
        assert sum(one["seconds"].values()) == pytest.approx(one["step_s"])
        assert sum(one["bytes"].values()) == pytest.approx(one["held_bytes"])
        for name, band in (
            ("step_s", "step_band_s"),
            ("held_bytes", "held_band_bytes"),
            ("tokens_per_s_per_device", "tokens_band"),
            ("mfu", "mfu_band"),
        ):
            assert one[band][0] < one[name] < one[band][1]
        assert one["bytes_bands"]["parameters"] == [one["bytes"]["parameters"]] * 2
        assert one["seconds_bands"].keys() == one["seconds"].keys()
        assert one["bands_rest_on"]["beyond"] == ["its trainer"]
        assert one["price_band"] is None
        assert 0 < one["causal_mfu"] < one["mfu"]
    recommended = result["recommended"]
    plan = Plan.from_json(json.dumps(recommended["plan"]))
    assert plan.mesh.world_size == recommended["devices"] == 8
    assert found["plans"][0].keys() < recommended.keys()


def test_the_schema_finds_what_is_not_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    main([*FAST, "--json"])
    result = json.loads(capsys.readouterr().out)
    for key, value in (("seen", "many"), ("objective", "speed"), ("more", 1)):
        wrong = {**result, "search": {**result["search"], key: value}}
        with pytest.raises(ValidationError):
            check(wrong)
    del result["search"]["plans"]
    with pytest.raises(ValidationError):
        check(result)
