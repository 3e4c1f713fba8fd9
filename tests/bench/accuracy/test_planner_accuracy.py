"""Rows of published runs: what was measured, what is predicted, errors, the command."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench import planner_accuracy
from bench.accuracy import fit
from bench.accuracy.errors import errors, fitting, rate_pair, step_pair
from bench.accuracy.fit import LEAVE_OUT, predict_left_out
from bench.accuracy.groups import publisher_of, short, within
from bench.accuracy.predict import Adjust, Case, Prediction, cases_of, predict, predict_cases
from bench.accuracy.published.measured import measured
from bench.accuracy.published.models import model_of
from bench.accuracy.published.plans import candidates_of, sequences_of
from bench.accuracy.published.programs import program_of
from bench.accuracy.published.rows import Row
from bench.accuracy.report import summary_text
from echelon.cost.seconds.trainers import FRAMEWORKS

GPT = {
    "source": "Paper et al. 2021 Table 1",
    "year": "2021",
    "model": "GPT",
    "layers": "24",
    "hidden": "2304",
    "heads": "24",
    "vocab": "51200",
    "seq_len": "2048",
    "gated_mlp": "false",
    "gpu": "A100-80GB",
    "n_gpus": "32",
    "gpus_per_node": "8",
    "inter_link": "8x HDR IB 200Gb/s per node",
    "framework": "Megatron-LM",
    "dp": "32",
    "tp": "1",
    "pp": "1",
    "micro_batch": "16",
    "global_batch": "512",
    "precision": "fp16",
    "recompute": "full",
    "flash_attn": "false",
    "completeness": "A",
}


def row(name: str = "r", **columns: str) -> Row:
    return Row(id=name, cells={**GPT, **columns})


def test_seconds_follow_from_hardware_flops() -> None:
    one = row(tflops_per_gpu="100", flops_convention="hardware FLOPs: 96*B*s*l*h^2*(1+s/6h+V/16lh)")
    flops = 96 * 512 * 2048 * 24 * 2304**2 * (1 + 2048 / (6 * 2304) + 51200 / (16 * 24 * 2304))
    found = measured(one, model_of(one), 32.0, 312e12)
    assert found.step_s == pytest.approx(flops / 32 / 100e12)
    assert found.how == "tflops_per_gpu"


@pytest.mark.parametrize(
    ("convention", "attention"),
    [("model FLOPs (6N + 12Lhs), non-causal", 12), ("model FLOPs; attention is CAUSAL (half)", 6)],
)
def test_seconds_follow_from_model_flops(convention: str, attention: int) -> None:
    one = row(tflops_per_gpu="100", flops_convention=convention, params_total="1.7e9")
    flops = 512 * 2048 * (6 * 1.7e9 + attention * 24 * 2304 * 2048)
    assert measured(one, model_of(one), 32.0, 312e12).step_s == pytest.approx(flops / 32 / 100e12)


def test_seconds_of_the_row_come_before_tokens_and_flops() -> None:
    one = row(step_time_s="2", tokens_per_s_per_gpu="1", tflops_per_gpu="1")
    assert measured(one, model_of(one), 32.0, 312e12).step_s == 2.0
    rate = measured(row(tokens_per_s_per_gpu="4096"), model_of(one), 32.0, 312e12)
    assert rate.step_s == pytest.approx(512 * 2048 / 32 / 4096)


def test_a_row_says_that_it_did_not_run_or_nothing() -> None:
    assert measured(row(), model_of(row()), 32.0, 312e12).silent
    assert not measured(row(), model_of(row()), 32.0, 312e12).out_of_memory
    assert measured(row(mem_per_gpu_gb="OOM"), model_of(row()), 32.0, 1.0).out_of_memory
    assert not measured(row(step_time_s="1"), model_of(row()), 32.0, 1.0).silent


def test_a_silent_row_did_not_run_where_others_of_its_source_did() -> None:
    alone = fitting(predict([row("a"), row("b")]))
    assert (alone.ran, alone.failed) == (0, 0)
    beside = fitting(predict([row("a"), row("b", step_time_s="5")]))
    assert (beside.ran, beside.failed) == (1, 1)


def test_what_no_formula_can_take_refuses_its_row_only() -> None:
    bad = row("bad", intra_link="0 Gb/s", inter_link="0 Gb/s", seq_len="100000000")
    silly = row("silly", layers="1e6", hidden="64", heads="1e8", tp="1e7", n_gpus="1e7", dp="1")
    found = predict([bad, row("good"), silly])
    assert [one.status for one in found[:2]] == ["ok", "ok"]
    assert found[2].status in ("ok", "out-of-range")


def test_cells_that_contradict_each_other_are_told() -> None:
    text = summary_text(predict([row("a", dp="7", step_time_s="5")]))
    assert "a: dp is taken as 32.0: n_gpus / (tp x pp x cp); the row's 7 makes 7" in text


def test_blank_expert_parallelism_is_one_that_fits() -> None:
    (one,) = predict([row(model="Mixtral 8x7B", layers="32", hidden="4096", ffn_hidden="14336")])
    assert one.case is not None
    assert {float(each.layout.ep) for each in one.case.candidates} == {1.0, 2.0, 4.0, 8.0}
    assert "ep" in {note.field for note in one.row.assumed}


def test_every_row_has_a_prediction_or_a_rule() -> None:
    blank = dict.fromkeys(GPT, "")
    rows = [
        row("whole"),
        row("blank", dp="", zero_stage="", micro_batch="", recompute="", flash_attn=""),
        row("strange", gpu="Quantum 9000", framework="MyTrainer", inter_link="smoke signals"),
        row("devices", n_gpus="12", tp="8"),
        row("empty", **blank),
        row("mixture", model="Mixtral 8x7B", layers="", hidden="", heads="", ep="8"),
    ]
    found = {one.row.id: one for one in predict(rows)}
    assert {name: one.status for name, one in found.items()} == {
        "whole": "ok",
        "blank": "ok",
        "strange": "ok",
        "devices": "world-size-is-product",
        "empty": "missing-setting",
        "mixture": "ok",
    }
    assert found["mixture"].case is not None
    assert found["mixture"].case.model.experts == 8.0
    said = {note.field for note in found["blank"].row.assumed}
    assert {"dp", "zero_stage", "micro_batch", "flash_attn"} <= said
    assert {"gpu", "inter_link"} <= {note.field for note in found["strange"].row.assumed}


def test_degrees_that_disagree_follow_the_devices() -> None:
    (one,) = predict([row(dp="7")])
    assert one.chosen is not None
    assert one.chosen.layout.dp == 32.0
    assert "dp" in {note.field for note in one.row.assumed}


def test_blank_settings_take_the_fastest_that_fits() -> None:
    (free,) = predict([row(micro_batch="")])
    fixed = predict([row(str(size), micro_batch=str(size)) for size in (1, 2, 4, 8)])
    fits = [one.step_s for one in fixed if one.fits and one.step_s is not None]
    assert free.step_s == pytest.approx(min(fits))


def test_batches_in_tokens_and_lengths_in_ki() -> None:
    one = row(global_batch="1M tokens", seq_len="8k")
    assert model_of(one).length == 8192.0
    assert sequences_of(one, model_of(one)) == round(1e6 / 8192)


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("full", {1.0}),
        ("none", {0.0}),
        ("selective", {0.0}),
        ("full, 6 layers", {0.25}),
        ("1 of 3", {1 / 3}),
        ("selective (every-other layer)", {0.5}),
    ],
)
def test_shares_of_blocks_that_run_again(text: str, shares: set[float]) -> None:
    run = row(recompute=text)
    found = candidates_of(run, model_of(run), program_of(run))
    assert {float(np.float64(one.layout.recompute)) for one in found} == shares
    assert {float(np.float64(one.layout.selective)) for one in found} == {
        float(text == "selective")
    }


def test_sharded_parameters_under_a_pipeline_are_gathered_once_a_step() -> None:
    columns = {"framework": "torchtitan (FSDP2)", "zero_stage": "3", "year": "2024"}
    (one,) = predict([row(pp="4", dp="8", schedule="Interleaved 1F1B", **columns)])
    assert one.chosen is not None
    assert (one.chosen.layout.zero, one.chosen.layout.virtual) == (1.0, 2.0)


def test_hybrid_sharding_cuts_over_a_node() -> None:
    (one,) = predict([row(framework="PyTorch FSDP (HSDP)", zero_stage="3")])
    assert one.chosen is not None
    assert (one.chosen.layout.dp_shard, one.chosen.layout.dp_replicate) == (8.0, 4.0)


def said(name: str, predicted: float, real: float) -> Prediction:
    """Return a prediction of so many seconds for a row that took `real`."""
    (one,) = predict([row(name, step_time_s=str(real))])
    return replace(one, step_s=predicted, tokens_per_s=1.0 / predicted)


def test_errors_and_order_by_hand() -> None:
    # Pairs: (1, 2) right, (1, 4) right, (2, 4) wrong; 4 and 4.01 are nearer than 1 %.
    taken = [said("a", 1.1, 1), said("b", 3, 2), said("c", 2.8, 4), said("d", 4.01, 4.01)]
    found = errors(taken, step_pair, rate_pair)
    assert found is not None
    off = [0.1, 0.5, -0.3, 0.0]
    assert found.mean == pytest.approx(sum(map(abs, off)) / 4)
    assert found.bias == pytest.approx(sum(off) / 4)
    assert found.median == pytest.approx(0.2)
    assert found.least == pytest.approx(-0.3)
    assert (found.pairs, found.right_pairs) == (5, 4)
    assert errors(predict([row()]), step_pair) is None


def test_which_runs_fit() -> None:
    ran, failed = predict([row("a", step_time_s="1"), row("b", mem_per_gpu_gb="OOM")])
    found = fitting([replace(ran, fits=True), replace(failed, fits=False)])
    assert (found.ran, found.ran_said, found.failed, found.failed_said) == (1, 1, 1, 1)


def test_names_of_sources() -> None:
    source = "github.com/a/b docs/README.md @0123abcd, table 'H100'"
    assert publisher_of(row(source=source)) == "github.com/a/b"
    assert within(source, "github.com/a/b") == "table 'H100'"
    assert publisher_of(row()) == "Paper et al. 2021"
    assert within(GPT["source"], publisher_of(row())) == "Table 1"
    assert len(short("x" * 99, 30)) == 30


def test_left_out_groups_are_not_fitted_to() -> None:
    rows = [row(str(n), source=f"S{n % 3} Table {n}", step_time_s="1") for n in range(5)]
    cases, _ = cases_of(rows)
    fitted: list[set[str]] = []

    def refit(outside: object) -> Adjust:
        assert isinstance(outside, list)
        fitted.append({publisher_of(case.row) for case in outside})
        slower = float(len(fitted))

        def changed(inside: object) -> list[Case]:
            assert isinstance(inside, list)
            return [
                replace(case, software=replace(FRAMEWORKS["megatron"], step_s=1000.0 * slower))
                for case in inside
            ]

        return changed

    found = predict_left_out(cases, refit, LEAVE_OUT["publisher"])
    assert fitted == [{"S1", "S2"}, {"S0", "S2"}, {"S0", "S1"}]
    assert [one.row.id for one in found] == ["0", "1", "2", "3", "4"]
    assert [round((one.step_s or 0) / 1000) for one in found] == [1, 2, 3, 1, 2]


def write(path: Path, rows: list[Row]) -> Path:
    names = ["id", *dict.fromkeys(name for one in rows for name in one.cells)]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({"id": one.id, **one.cells} for one in rows)
    path.write_text(text.getvalue(), encoding="utf-8")
    return path


def test_command_writes_predictions_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        row("a", step_time_s="5", mem_per_gpu_gb="60"),
        row("b", global_batch="1024", step_time_s="9", framework="DeepSpeed ZeRO-3"),
        row("c", layers="", hidden="", model="?"),
        row("d", completeness="C", step_time_s="5"),
    ]
    out = tmp_path / "pred.csv"
    assert planner_accuracy.main([str(write(tmp_path / "f.csv", rows)), "--out", str(out)]) == 0
    table = list(csv.DictReader(out.read_text(encoding="utf-8").splitlines()))
    assert list(table[0]) == [
        "id",
        "step_time_s",
        "tokens_per_s_per_gpu",
        "mem_per_gpu_gb",
        "fits",
        "status",
        "mem_kind",
        "mem_allocated_gb",
        "mem_driver_gb",
        "mem_low_gb",
        "mem_high_gb",
    ]
    assert [line["id"] for line in table] == ["a", "b", "c", "d"]
    assert [line["status"] for line in table] == ["ok", "ok", "missing-setting", "ok"]
    a = table[0]
    rate = 512 * 2048 / 32 / float(a["step_time_s"])
    assert float(a["tokens_per_s_per_gpu"]) == pytest.approx(rate, rel=1e-4)
    assert a["fits"] in ("true", "false")
    low, middle, high = (float(a[f"mem_{name}_gb"]) for name in ("low", "per_gpu", "high"))
    assert low < middle < high
    assert float(a["mem_allocated_gb"]) == middle < float(a["mem_driver_gb"])
    assert a["mem_kind"] == "allocated"
    assert (table[2]["step_time_s"], table[2]["fits"]) == ("", "")
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "all rows of completeness A and B          2" in text
    assert "other rows                                1" in text
    assert "DeepSpeed ZeRO-3" in text
    assert "c: missing-setting" in text


def test_command_prints_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "f.csv", [row("a", step_time_s="5", dp="")])
    assert planner_accuracy.main([str(path), "--out", str(tmp_path / "p.csv"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["version"] == 1
    assert found["summary"]["step_time"]["rows"] == 1
    (one,) = found["rows"]
    assert one["measured_from"] == "step_time_s"
    assert {"field": "dp", "value": 32.0, "why": "n_gpus / (tp x pp x cp)"} in one["assumed"]


def test_command_without_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "none.csv")
    assert planner_accuracy.main([missing, "--out", str(tmp_path / "p.csv")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_the_command_leaves_groups_out_of_where_a_fit_begins_and_of_what_it_keeps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [row(str(n), source=f"S{n} Table {n}", step_time_s="5") for n in range(2)]
    begun: list[object] = []

    def nothing_learned(some: list[Case], start: object = None) -> dict[str, float]:
        begun.append(start)
        return {}

    monkeypatch.setattr(fit, "refit", nothing_learned)
    out, text = tmp_path / "pred.csv", str(write(tmp_path / "f.csv", rows))
    assert planner_accuracy.main([text, "--out", str(out), "--leave-out", "publisher"]) == 0
    assert begun == [None, None]
    found = float(next(csv.DictReader(out.read_text(encoding="utf-8").splitlines()))["step_time_s"])
    cases, _ = cases_of(rows)
    before = predict_cases([*map(fit.unfitted, cases)])[0].step_s
    package = predict_cases(cases)[0].step_s
    assert before
    assert package
    assert found == pytest.approx(before, rel=1e-3)
    assert found != pytest.approx(package, rel=1e-3)
