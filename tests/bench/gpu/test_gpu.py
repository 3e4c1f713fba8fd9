"""The GPU command on a machine without one: its plans, tables, ends, and a rehearsal on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu.loads import LOADS, OFFLOAD, TRAINING, Case, Settings, peak_flops
from bench.gpu.report import Machine, Outcome, not_run, page
from bench.gpu.run import ROOT, main
from bench.gpu.subjects import gpu_plan
from echelon.config.presets import read_preset
from echelon.core.parameters import num_parameters
from echelon.cost.bytes.held import bytes_held

MACHINE = Machine(
    date="2026-01-02", device="NVIDIA X", torch="2.11.0", driver="580", peak_flops=100e12
)
FIGURES = {
    "step_s": 0.25,
    "spread": 0.02,
    "peak_bytes": 2_500_000_000,
    "first_loss": 10.4,
    "last_loss": 9.8,
    "launches": 1234,
    "kernels": [["gemm|kernel", 40, 0.05]],
}


def _outcome(**changed: object) -> Outcome:
    return Outcome(
        **{
            "load": "1b",
            "sequences": 8,
            "case": Case(framework="echelon", zero_stage=3),
            "figures": FIGURES,
            **changed,
        }
    )


@pytest.mark.parametrize(("name", "billions"), [("0.4b", 0.37), ("1b", 1.1), ("3b", 3.0)])
def test_models_have_the_size_of_their_name(name: str, billions: float) -> None:
    assert num_parameters(LOADS[name].shape) / 1e9 == pytest.approx(billions, rel=0.02)


def test_every_case_has_a_label_of_its_own_and_crosses_as_json() -> None:
    cases = {*TRAINING, *OFFLOAD}
    assert len({case.label for case in cases}) == len(cases) == 14
    for case in cases:
        settings = Settings(load="1b", sequences=8, case=case, offload_dir="somewhere")
        assert Settings.from_json(settings.to_json()) == settings


def test_the_plan_has_the_machinery_and_the_bytes_of_its_stage() -> None:
    for stage in (0, 3):
        case = Case(framework="echelon", zero_stage=stage)
        plan = gpu_plan(Settings(load="1b", sequences=8, case=case))
        assert (plan.layout.zero.stage, plan.num_microbatches) == (stage, 1)
        held = sum(term.bytes for term in bytes_held(plan, 0))
        assert held == pytest.approx(16 * num_parameters(plan.model), rel=1e-3)


def test_a_batch_is_halved_until_it_fits() -> None:
    load = LOADS["3b"]
    assert load.fitting_sequences(200 * 10**9) == 4
    assert load.fitting_sequences(load.likely_bytes(2)) == 2
    assert load.fitting_sequences(40 * 10**9) == 0


@pytest.mark.parametrize(
    ("device", "preset"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA B200", "b200"),
    ],
)
def test_peaks_are_those_of_the_clusters(device: str, preset: str) -> None:
    found = read_preset("clusters", preset)
    assert found is not None
    tables: Any = found.tables
    assert peak_flops(device) == tables["device"]["peak_flops"]["bf16"]


def test_a_device_of_unknown_peak_has_none() -> None:
    assert peak_flops("NVIDIA L40S") == 362e12
    assert peak_flops("NVIDIA L4") == 121e12
    assert peak_flops("NVIDIA Quadro P400") is None


def test_rates_follow_from_the_seconds_of_a_step() -> None:
    outcome = _outcome()
    assert outcome.tokens_per_s() == 8 * 2048 / 0.25
    weights = num_parameters(LOADS["1b"].shape) - 32_000 * 2048
    per_token = 6 * weights + 12 * 22 * 2048 * 2048
    assert outcome.utilization(100e12) == pytest.approx(per_token * 65_536 / 100e12, rel=1e-3)
    assert outcome.utilization(None) is None


def test_the_page_has_date_device_figures_reasons_and_kernels() -> None:
    skipped = _outcome(case=Case(framework="transformers"), reason="transformers is not installed")
    text = page(MACHINE, tests="41 passed", training=[_outcome(), skipped], offload=[])
    assert "# One GPU, 2026-01-02" in text
    assert "NVIDIA X; peak 100 TFLOP/s" in text
    assert "`tests/cuda`: 41 passed" in text
    row = "| 1b, 8 x 2048 | Echelon ZeRO-3, eager | 250.0 | 2% | 65,536 |"
    assert row in text
    assert "| 2.50 | 1234 | 10.400 -> 9.800 |" in text
    assert "transformers Llama, eager | not run: transformers is not installed |" in text
    assert "| 50.00 | 20% | 40 | `gemm/kernel` |" in text
    assert "## Offload\n\nNot run." in text
    rows = [line for line in text.splitlines() if line.startswith("| 1b")]
    assert len({line.count("|") for line in rows}) == 1


def test_a_page_says_that_nothing_was_run() -> None:
    assert "Not run: no device here." in not_run("2026-01-02", "no device here")


@pytest.mark.parametrize("flag", ["--models=7b", "--parts=speed", "--models=,"])
def test_what_is_not_known_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([flag])
    assert ended.value.code == 2
    assert "known are" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_the_note_says_not_run(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable}
    command = [str(ROOT / "bench/gpu/run.sh"), "--results", str(tmp_path)]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert ran.returncode == 3, ran.stderr
    (note,) = tmp_path.iterdir()
    assert "Not run: torch" in note.read_text(encoding="utf-8")
    assert str(note) in ran.stderr


def test_a_rehearsal_on_the_cpu_writes_every_part(tmp_path: Path) -> None:
    results, files = tmp_path / "results", tmp_path / "files"
    files.mkdir()
    chosen = "^(plain PyTorch, eager|Echelon ZeRO-3, .*in files, eager)$"
    arguments = ["--device", "cpu", "--models", "tiny", "--parts", "training,offload"]
    arguments += ["--cases", chosen, "--steps", "1", "--repeats", "1"]
    ended = main([*arguments, "--results", str(results), "--offload-dir", str(files)])
    (written,) = results.iterdir()
    text = written.read_text(encoding="utf-8")
    assert ended == 0, text
    assert "a rehearsal, no GPU" in text
    rows = [line for line in text.splitlines() if line.startswith("| tiny")]
    assert len(rows) == 3
    assert not any("not run" in row for row in rows)
    assert "aten::mm" in text
    assert list(files.iterdir()) == []
