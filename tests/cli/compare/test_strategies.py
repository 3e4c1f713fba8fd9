"""`echelon compare --strategies`: the table, and flags that do not go together."""

from __future__ import annotations

import json

import pytest

from echelon.cli.compare import compare_with_one_process
from echelon.cli.main import main
from echelon.proof.deviations import Deviation, StrategyDeviation

OFF = Deviation(error=0.5, allowed=1e-10, worst="head.weight, step 1")


@pytest.mark.slow
@pytest.mark.system("S56")
def test_a_table_shows_each_precision_and_the_order_of_sums(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["compare", "nano", "--strategies", "tp,ep"]) == 0
    text = capsys.readouterr().out
    for precision in ("fp64", "fp32"):
        assert f"Largest deviation from one process, {precision}" in text
    assert "tp: outputs of row-parallel layers: parts of 2 tensor ranks (all-reduce)" in text
    assert "ep is refused by no-effect" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_a_strategy_that_fails_is_said_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = StrategyDeviation(
        strategy="dp",
        about="samples",
        mesh="dp2",
        order=("gradients",),
        deviations={"fp64": dict.fromkeys(("loss", "gradient", "parameter"), OFF)},
    )
    at = "echelon.cli.compare.compare_strategies"
    monkeypatch.setattr(at, lambda *_, **__: (wrong,))
    assert compare_with_one_process("nano", "dp", 2, (), as_json=False) == 1
    assert "5.0e-01 (1e-10)  FAILS" in capsys.readouterr().out
    assert compare_with_one_process("nano", "dp", 2, (), as_json=True) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["strategies"][0]["deviations"]["fp64"]["loss"]["error"] == 0.5


@pytest.mark.parametrize(
    "arguments",
    [
        ["nano"],
        ["nano", "nano-zero3", "--strategies", "dp"],
        ["nano", "nano-zero3", "--ranks", "2"],
        ["nano", "nano-zero3", "--set", "mesh.tp=2"],
        ["nano", "--strategies", "dp,nosuch"],
    ],
)
def test_flags_that_say_nothing_together_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *arguments]) == 2
    assert "error[bad-argument]" in capsys.readouterr().err
