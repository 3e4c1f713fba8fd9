"""`echelon observe --experts`: a run of ranks leaves its loads, and what is asked wrongly."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.cli.main import main
from echelon.cli.observe import hotspots_text
from echelon.core.model_shape import Experts
from echelon.telemetry.routing import ExpertHotspots, RecordedLoad
from tests.parallel.layouts import MIXTRAL, plan_of

TINY = (
    "mesh.pp=2",
    "pipeline.stages=[[0, 1], [2]]",
    "mesh.dp_shard=2",
    "mesh.ep=2",
    "model.layers=3",
    "model.hidden=32",
    "model.experts.num_experts=4",
    "model.experts.top_k=2",
    "model.experts.ffn=24",
    "model.experts.first_dense_layers=1",
    "experts.balance=both",
    "experts.capacity_factor=1.0",
    "batch.sequence_length=16",
    "batch.global_sequences=8",
    "batch.microbatch_sequences=2",
    "optimizer.warmup_steps=2",
    "train.steps=4",
    "train.validate_every=2",
    "train.run_name=tiny",
    "data.source=words.txt",
)
ASSIGNMENTS = 8 * 16 * 2
"""Of one layer in one step: each token of the global batch meets two experts."""


def _refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["observe", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    return output.err


@pytest.mark.slow
def test_a_run_of_ranks_says_where_its_tokens_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = [f"line {i} of {i * i % 97} words, more or less\n" for i in range(400)]
    (tmp_path / "words.txt").write_text("".join(lines))
    monkeypatch.chdir(tmp_path)
    assert main(["train", "nano", *(word for text in TINY for word in ("--set", text))]) == 0
    line = next(one for one in capfd.readouterr().err.splitlines() if one.startswith("step 4/4"))
    assert "  experts " in line
    assert "  dropped " in line
    assert "  aux 0.0" in line
    # Layer 0 is dense; layer 1 is on the first stage and layer 2 on the second, whose ranks are 2
    # and 3.
    folder = Path("runs/tiny")
    found = {path.name for path in folder.glob("routing*")}
    assert found == {"routing.jsonl", "routing.rank-0002.jsonl"}
    assert main(["observe", str(folder), "--experts", "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert (result["schema"], result["command"], result["step"]) == (1, "observe", 4)
    assert [layer["layer"] for layer in result["layers"]] == [1, 2]
    assert all(sum(layer["counts"]) == ASSIGNMENTS for layer in result["layers"])
    assert all(0 <= layer["dropped"] < ASSIGNMENTS for layer in result["layers"])
    assert set(result["received_bytes"]) == {"0", "1", "2", "3"}
    assert all(size % (32 * 4) == 0 for size in result["received_bytes"].values())
    assert main(["observe", str(folder), "--experts", "--step", "1"]) == 0
    text = capfd.readouterr().out
    assert text.startswith("step 1 of tiny: tokens that chose each expert (64 where all have as")
    assert main(["observe", str(folder)]) == 0
    assert "\nexperts     imbalance " in capfd.readouterr().out
    err = _refusal([str(folder), "--experts", "--step", "9"], capfd)
    assert err.startswith("error[step-recorded]")
    assert "--step 1, --step 2, --step 3 or --step 4" in err
    code = (
        "import sys; from echelon.cli.main import main; "
        f"main(['observe', {str(folder)!r}, '--experts']); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_what_does_not_belong_together_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, said in (
        (["--schedule", "--experts"], "--schedule and --experts are two questions"),
        (["--step", "2"], "--step says which step"),
        (["--experts", "--out", "x.csv"], "would hold a page"),
    ):
        err = _refusal(["runs/none", *flags], capsys)
        assert err.startswith("error[bad-argument]")
        assert said in err


def test_a_dense_run_has_no_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").write_text(plan_of().to_json())
    err = _refusal([str(tmp_path), "--experts"], capsys)
    assert err.startswith("error[run-has-experts]")


def test_many_experts_are_told_by_the_fullest_and_the_emptiest() -> None:
    model = Experts(num_experts=20, top_k=2, ffn=12)
    counts = (*range(10, 29), 0)
    load = RecordedLoad(layer=3, counts=counts, dropped=12, aux_loss=None, z_loss=None)
    plan = plan_of(model=replace(MIXTRAL, experts=model), dp_shard=2, ep=2)
    spots = ExpertHotspots(run=Path("run"), plan=plan, step=7, layers=(load,), received_bytes={})
    lines = hotspots_text(spots).splitlines()
    assert lines[2].split() == ["layer", "imbalance", "busiest", "most", "fewest", "dropped"]
    assert lines[3].split() == ["3", "1.55", "18", "28", "0", "12"]
    assert "hottest     expert 18 of layer 3: 28 tokens, 1.55 times the mean" in lines
    assert "idle        layer.expert 3.19" in lines
    assert f"dropped     12 of {sum(counts)} assignments, 3.3 %" in lines
    assert lines[-1] == "received    not known: the run has no events of this step"
