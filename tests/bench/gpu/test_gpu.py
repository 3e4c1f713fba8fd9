"""The GPU command on a machine without one: its plans, tables, ends, and a rehearsal on the CPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch._dynamo.exc import Unsupported

from bench.gpu import experts
from bench.gpu.budget import Budget, run_limited
from bench.gpu.loads import (
    LOADS,
    OFFLOAD,
    TRAINING,
    Case,
    Settings,
    known_device,
    memory_bandwidth,
    peak_flops,
)
from bench.gpu.measure import measure
from bench.gpu.report import Findings, Machine, Outcome, not_run, page
from bench.gpu.run import PARTS, ROOT, main, predicted
from bench.gpu.subjects import build, gpu_plan
from echelon.config.presets import read_preset
from echelon.core.choices.kernels import KernelProvider
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
    "graphs": 1,
    "graph_breaks": 0,
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


@pytest.mark.parametrize(
    ("name", "billions"), [("0.4b", 0.37), ("1b", 1.1), ("3b", 3.0), ("8b", 8.03)]
)
def test_models_have_the_size_of_their_name(name: str, billions: float) -> None:
    assert num_parameters(LOADS[name].shape) / 1e9 == pytest.approx(billions, rel=0.02)


def test_every_case_has_a_label_of_its_own_and_crosses_as_json() -> None:
    cases = {*TRAINING, *OFFLOAD}
    assert len({case.label for case in cases}) == len(cases) == 15
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
    text = page(
        MACHINE,
        Findings(tests="41 passed", training=[_outcome(), skipped], kernels="a table"),
    )
    assert "# One GPU, 2026-01-02" in text
    assert "NVIDIA X; peak 100 TFLOP/s" in text
    assert "`tests/cuda`: 41 passed" in text
    row = "| 1b, 8 x 2048 | Echelon ZeRO-3, triton kernels | 250.0 | 2% | 65,536 |"
    assert row in text
    assert "| 2.50 | 1234 | 10.400 -> 9.800 |" in text
    assert "transformers Llama, eager | not run: transformers is not installed |" in text
    assert "| 50.00 | 20% | 40 | `gemm/kernel` |" in text
    assert "## Offload\n\nNot run." in text
    assert "## Kernels\n\na table" in text
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


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_the_note_says_not_run(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable}
    command = [str(ROOT / "bench/gpu/run.sh"), "--results", str(tmp_path)]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert ran.returncode == 3, ran.stderr
    (note,) = tmp_path.iterdir()
    assert "Not run: torch" in note.read_text(encoding="utf-8")
    assert str(note) in ran.stderr


def test_predictions_stand_beside_with_their_error() -> None:
    settings = Settings(load="1b", sequences=8, case=Case(framework="echelon"))
    seconds, peak = predicted(settings, "NVIDIA H200")
    assert seconds is not None
    assert peak is not None
    # No faster than the peak, and no less than the state that rests there.
    assert seconds > 8 * 2048 * 6 * 1e9 / 989e12
    assert peak > 16 * 1.1e9
    assert predicted(settings, "NVIDIA L4") == (None, None)
    plain = replace(settings, case=Case(framework="plain"))
    assert predicted(plain, "NVIDIA H200") == (None, None)
    row = _outcome(predicted_s=0.2, predicted_bytes=3e9).row(None)
    assert row.endswith("| 200.0 (-20%) | 3.00 (+20%) | - |")


def test_the_planner_knows_the_device_by_the_name_of_its_driver() -> None:
    known = known_device("NVIDIA H200")
    assert known is not None
    assert known.memory_bandwidth == memory_bandwidth("NVIDIA H200") == 4800e9
    assert known.flops("bf16") == peak_flops("NVIDIA H200")
    assert known_device("NVIDIA H100 PCIe") is None


def test_the_part_that_runs_has_its_share_and_what_others_left() -> None:
    now = [0.0]
    budget = Budget(100, {"a": 1, "b": 1, "c": 2}, clock=lambda: now[0])
    budget.begin("a")
    assert budget.left_s == 25
    now[0] = 4
    budget.begin("b")
    assert budget.left_s == 32
    now[0] = 60
    assert budget.left_s < 0
    budget.begin("c")
    assert budget.left_s == 40
    now[0] = 200
    assert budget.left_s < 0


def test_a_command_that_is_over_its_time_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    # The child would hold a pipe open for a minute, and write its file after two seconds.
    late = tmp_path / "late"
    script = f"echo begun; (sleep 2; touch {late}; sleep 60) & sleep 60"
    ended = run_limited(["sh", "-c", script], limit_s=0.5, cwd=tmp_path)
    assert (ended.code, ended.stdout) == (None, "begun\n")
    time.sleep(2)
    assert not late.exists()
    quick = run_limited(["sh", "-c", "echo said >&2; exit 4"], limit_s=30, cwd=tmp_path)
    assert (quick.code, quick.stderr) == (4, "said\n")


@pytest.mark.parametrize("missing", ["hypothesis", "pytest_timeout"])
def test_tests_are_left_out_by_name_where_a_package_is_missing(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == missing else found(name)
    )
    arguments = ["--device", "cpu", "--models", "tiny", "--parts", "tests"]
    assert main([*arguments, "--results", str(tmp_path)]) == 0
    (written,) = tmp_path.iterdir()
    assert f"`tests/cuda`: not run: {missing} not installed" in written.read_text("utf-8")


def test_what_has_no_time_or_room_left_is_named(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--models", "tiny", "--parts", "training,kernels,experts"]
    assert main([*arguments, "--budget", "1", "--results", str(tmp_path)]) == 0
    (written,) = tmp_path.iterdir()
    text = written.read_text("utf-8")
    assert text.count("not run: no time is left") == len(TRAINING) + 2
    assert LOADS["8b"].fitting_sequences(135 * 10**9) == 0
    in_host = Case(framework="echelon", zero_stage=3, optimizer_home="host")
    assert LOADS["8b"].fitting_sequences(135 * 10**9, in_host.state_bytes) == 4
    assert (in_host.bytes_at("host"), in_host.bytes_at("nvme")) == (12, 0)


@pytest.mark.slow
def test_plain_pytorch_compiles_to_one_graph_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(framework="plain", compiled=True)
    settings = Settings(load="tiny", sequences=1, case=case, device="cpu", compile_backend="eager")
    figures = measure(replace(settings, steps=1, repeats=1, warmup=1))
    assert (figures["graphs"], figures["graph_breaks"]) == (1, 0)

    def breaks(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return logits_BTV.mean() + labels_BT.sum() * 0

    monkeypatch.setattr("bench.gpu.subjects.mean_loss", breaks)
    torch.compiler.reset()
    step, _ = build(settings)
    with pytest.raises(Unsupported):
        step()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
# PyTorch's compiler looks for the gradient of an activation, and hides its own warning of it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_every_piece_of_echelon_compiles_whole() -> None:
    case = Case(framework="echelon", kernels="compiled")
    settings = Settings(load="tiny", sequences=2, case=case, device="cpu")
    torch.compiler.reset()
    figures = measure(replace(settings, steps=1, repeats=1, warmup=1))
    # Norm, norm with a sum, heads, SwiGLU, and the way back of three; the loss's two passes.
    assert figures["graphs"] >= 9
    assert figures["graph_breaks"] == 0


def test_a_case_has_the_kernels_of_its_plan() -> None:
    providers: tuple[KernelProvider, ...] = ("triton", "compiled", "plain")
    for provider in providers:
        case = Case(framework="echelon", kernels=provider)
        kernels = gpu_plan(Settings(load="1b", sequences=8, case=case)).layout.kernels
        assert (kernels.provider, kernels.of("loss")) == (provider, provider)
        assert case.label == f"Echelon ZeRO-0, {provider} kernels"
        assert case.compiles == (provider == "compiled")


@pytest.mark.slow
def test_a_rehearsal_on_the_cpu_runs_every_part_and_names_what_failed(tmp_path: Path) -> None:
    results, files = tmp_path / "results", tmp_path / "files"
    files.mkdir()
    chosen = "^(plain PyTorch, (eager|compiled)|Echelon ZeRO-3, .*in files, triton kernels)$"
    arguments = ["--device", "cpu", "--models", "tiny", "--compile-backend", "no-such-backend"]
    arguments += ["--cases", chosen, "--steps", "1", "--repeats", "1"]
    ended = main([*arguments, "--results", str(results), "--offload-dir", str(files)])
    (written,) = results.iterdir()
    text = written.read_text(encoding="utf-8")
    assert ended == 1, text
    assert "a rehearsal, no GPU" in text
    for part in ("Tests", "Training", "Kernels", "Offload", "One block of experts"):
        section = text.partition(f"## {part}")[2].partition("\n## ")[0]
        assert "skipped in" in section or "| tiny" in section or "|---|" in section, part
    rows = [line for line in text.splitlines() if line.startswith("| tiny")]
    assert len(rows) == 4
    (failed,) = [row for row in rows if "not run" in row]
    assert "plain PyTorch, compiled" in failed
    assert "ended with 1" in failed
    assert "aten::mm" in text
    assert "SDPA flash" in text
    assert list(files.iterdir()) == []


@pytest.mark.slow
def test_a_run_that_is_terminated_ends_its_case(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.gpu.run", "--device", "cpu", "--models", "tiny"]
    command += ["--parts", "training", "--steps", "1000000", "--results", str(tmp_path)]
    run = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        assert run.stderr is not None
        assert "training: tiny" in run.stderr.readline()
        deadline = time.monotonic() + 30
        while not (children := psutil.Process(run.pid).children()):
            assert time.monotonic() < deadline
        time.sleep(1)  # A child is there before the call that starts it has returned.
        run.terminate()
        assert run.wait(30) == 143
        assert not any(child.is_running() for child in children)
    finally:
        run.kill()
        run.communicate()


def test_help_names_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert ", ".join(PARTS) in " ".join(capsys.readouterr().out.split())


def test_a_block_of_experts_is_rehearsed_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts.grouped_matmul, "has_grouped_kernel", lambda _: True)
    arguments = ["--device", "cpu", "--sizes", "64x32x24", "--steps", "1", "--repeats", "1"]
    assert experts.main(arguments) == 0
    rows_told = [line for line in capsys.readouterr().out.splitlines() if " bf16" not in line]
    errors = [float(line.split("|")[-2]) for line in rows_told if line.startswith(("| E", "| t"))]
    assert len(errors) == 5
    # bf16 has eight bits; an expert that was left out would be seen.
    assert max(errors) < 0.05
    for text in ("64x32", "62x32x24", "64x30x24", "0x32x24"):
        with pytest.raises(ValueError, match=text):
            experts.block_plan(text, 8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_experts_are_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert experts.main([]) == 3
    assert "not run" in capsys.readouterr().err
