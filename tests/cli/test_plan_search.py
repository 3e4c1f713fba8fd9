"""`echelon plan MODEL --cluster`: its page, its object, its file, and its refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError

import echelon as ec
from echelon.cli.explain_json import search_schema
from echelon.cli.main import main
from echelon.config.load import load_job
from echelon.core.errors import InfeasiblePlan
from echelon.core.plan import Plan
from echelon.planner import search as searching
from echelon.planner.sweep import Sweep

FAST = ["plan", "nano", "--cluster", "8xh100", "--top", "3"]


def check(value: object) -> None:
    """Raise where an object is not of the published schema."""
    Draft202012Validator(search_schema()).validate(value)  # type: ignore[reportUnknownMemberType]


def test_the_page_fits_80_columns_and_tells_all(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--cluster",
        "8xh100",
        "--top",
        "4",
        "--objective",
        "front",
        "--price",
        "2",
        "--pin",
        "tp=1,2,4",
    ]
    assert main(["plan", "llama3-8b", *flags]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert max(map(len, output.out.splitlines())) <= 80
    for part in (
        "llama3-8b: 8.03B parameters, 32 blocks",
        "8xh100: 8 x H100 SXM 80 GB",
        "assumed ",
        "pinned    tp=1,2,4",
        "trainer   echelon",
        "step s  tok/s",
        "legal plans in",
        "plan-fits-memory",
        "for a million tokens",
        "No other plan has less",
        "sum (step)",
    ):
        assert part in output.out


def test_json_is_one_object_of_the_published_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FAST, "--json", "--objective", "front"]) == 0
    result = json.loads(capsys.readouterr().out)
    check(result)
    found = result["search"]
    assert found["seen"] >= found["computed"] > 0
    assert len(found["plans"]) == 3
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


def test_the_schema_is_published_by_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == search_schema()
    Draft202012Validator.check_schema(search_schema())
    assert main(["plan", "--help"]) == 0
    assert "echelon explain json" in capsys.readouterr().out


def test_the_winner_is_written_once_and_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, plan = tmp_path / "best.toml", tmp_path / "best.json"
    assert main([*FAST, "--json", "--out", str(run)]) == 0
    best = json.loads(capsys.readouterr().out)["search"]["plans"][0]["plan"]
    assert load_job(run).plan == Plan.from_json(json.dumps(best))
    assert main([*FAST, "--out", str(plan)]) == 0
    assert Plan.read(plan) == load_job(run).plan
    before = run.read_text()
    assert main([*FAST, "--out", str(run)]) == 2
    assert "error[never-overwrite]" in capsys.readouterr().err
    assert run.read_text() == before


def test_a_run_file_is_searched_on_its_own_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run.toml"
    run.write_text('extends = "nano"\n[cluster]\npreset = "4xcpu"\n[mesh]\ntp = 2\n')
    assert main(["plan", str(run), "--search", "--top", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["search"]
    assert (found["cluster"], found["plans"][0]["devices"]) == ("4xcpu", 4)
    assert main(["plan", str(run), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["plan"]["layout"]["mesh"]["tp"] == 2


@pytest.mark.parametrize(
    ("arguments", "rule", "works"),
    [
        (["lama3-8b", "--cluster", "8xh100"], "unknown-preset", "llama3-8b"),
        (["nano", "--cluster", "8xh10"], "unknown-preset", "8xh100"),
        (["nano", "--cluster", "8xh100", "--pin", "tq=8"], "unknown-pin", "tp"),
        (["nano", "--cluster", "8xh100", "--pin", "tp=3"], "pin-excludes-everything", "--pin tp=1"),
        (["nano", "--cluster", "8xh100", "--objective", "cost"], "objective-needs-price", "2.5"),
        (["nano", "--cluster", "8xh100", "--trainer", "genric"], "unknown-trainer", "generic"),
        (["nano", "--cluster", "8xh100", "--top", "0"], "bad-argument", "--top 1"),
        (["nano", "--cluster", "8xh100", "--price", "nan"], "bad-argument", "--price 2.5"),
        (["nano", "--cluster", "8xh100", "--price", "inf"], "bad-argument", "--price 2.5"),
        (["nano", "--cluster", "8xh100", "--price=-1"], "bad-argument", "--price 2.5"),
        (["nano", "--cluster", "8xh100", "--out", "x.yaml"], "bad-argument", "--out x.toml"),
        (["nano", "--pin", "tp=2"], "bad-argument", "--search"),
        (["nano", "--out", "best.toml"], "bad-argument", "--cluster"),
        (["nano", "--objective", "throughput"], "bad-argument", "--search"),
        (
            ["nano", "--cluster", "8xh100", "--pin", "tp=2", "--pin", "tp=4"],
            "bad-argument",
            "tp=2,4",
        ),
    ],
)
def test_what_is_wrong_exits_2_with_what_works(
    arguments: list[str], rule: str, works: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"error[{rule}]: ")
    assert works in output.err


def test_an_interrupt_prints_the_best_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    look = Sweep._look
    calls: list[int] = []

    def once(self: Sweep, *arguments: Any) -> None:
        calls.append(1)
        if len(calls) > 1:
            raise KeyboardInterrupt
        look(self, *arguments)

    monkeypatch.setattr(Sweep, "_look", once)
    assert main(["plan", "llama3-8b", "--cluster", "64xh100", "--json"]) == 130
    output = capsys.readouterr()
    result = json.loads(output.out)
    check(result)
    assert result["search"]["interrupted"] is True
    assert result["search"]["plans"]
    assert "interrupted: " in output.err
    monkeypatch.setattr(searching, "_walk", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(FAST) == 130
    assert capsys.readouterr().out == ""


INTERRUPTED = """
import os, signal, sys
from echelon.cli.main import main
from echelon.planner.sweep import Sweep

look, calls = Sweep._look, []

def looking(self, *arguments):
    calls.append(1)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGINT)
    look(self, *arguments)

signal.signal(signal.SIGINT, signal.default_int_handler)
Sweep._look = looking
sys.exit(main())
"""


def test_a_signal_prints_the_best_so_far() -> None:
    arguments = ["plan", "llama3-8b", "--cluster", "64xh100"]
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 130
    assert "first     64 ranks" in done.stdout
    assert done.stderr.startswith("interrupted: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_search_needs_no_torch() -> None:
    code = "import sys; from echelon.cli.main import main; main(sys.argv[1:]); "
    code += "print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, *FAST], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("False\n")


def test_a_model_on_a_cluster_is_the_best_plan() -> None:
    plan = ec.plan("llama3-8b", cluster="8xh200")
    assert plan.mesh.world_size == 8
    assert ec.plan("llama3-8b", cluster="8xh200", pins=["tp=4"]).mesh.tp == 4
    assert ec.plan("nano", cluster="8xh100").mesh.world_size == 1
    assert ec.plan("nano", cluster="8xh100", objective="time").mesh.world_size == 8
    with pytest.raises(InfeasiblePlan) as caught:
        ec.plan("llama3-8b", cluster="8xh200", pins=["pp=64"])
    assert caught.value.rules == ("pin-excludes-everything",)
