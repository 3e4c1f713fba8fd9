"""Everything that needs one CUDA GPU: `bench/gpu/run.sh`, which runs `python -m bench.gpu.run`.

The tests of `tests/cuda`; training steps of Llama-shaped models, eager and compiled, Echelon with
the machinery of ZeRO 0 and 3 beside plain PyTorch and transformers; offload to host memory and to
files. Every case runs in a process of its own, and the page in bench/results/ is written again
after each. No network is used. `--device cpu --models tiny` shows on any machine that it works.
Exit 1 where a test fails or a case ends in an error, 3 where torch sees no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.gpu.loads import LOADS, OFFLOAD, TRAINING, Case, Load, Settings, peak_flops
from bench.gpu.measure import RESULT
from bench.gpu.report import Machine, Outcome, not_run, page

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
PARTS = ("tests", "training", "offload")
OFFLOAD_LOAD = "1b"
TEST_PACKAGES = ("pytest", "pytest_timeout")
USABLE = 0.9
NO_GPU = 3


@dataclass(slots=True, kw_only=True)
class Session:
    """Hold the options of a run, and what came out so far."""

    options: argparse.Namespace
    machine: Machine
    memory_bytes: int
    path: Path
    tests: str = ""
    failed: bool = False
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)

    def save(self) -> None:
        """Write the page as it stands."""
        text = page(
            self.machine,
            tests=self.tests,
            training=self.outcomes.get("training", ()),
            offload=self.outcomes.get("offload", ()),
        )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen parts, print and write the tables."""
    options = _parser().parse_args(arguments)
    today = datetime.date.today().isoformat()
    if options.device == "cuda" and not torch.cuda.is_available():
        reason = f"torch {torch.__version__} sees no CUDA device on this machine"
        path = options.results / f"{today}-gpu.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(not_run(today, reason), encoding="utf-8")
        print(f"not run: {reason} ({path})", file=sys.stderr)
        return NO_GPU
    session = _session(options, today)
    if "tests" in options.parts:
        _run_tests(session)
        session.save()
    for part, cases in (("training", TRAINING), ("offload", OFFLOAD)):
        if part in options.parts:
            _run_part(session, part, cases)
    session.save()
    print(session.path.read_text(encoding="utf-8"))
    return 1 if session.failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench/gpu/run.sh", description=__doc__)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="where to run (cuda)")
    add("--models", type=_models, default=("0.4b", "1b", "3b"), help=f"of {', '.join(LOADS)}")
    add("--parts", type=_parts, default=PARTS, help=f"of {', '.join(PARTS)} (all)")
    add("--cases", type=re.compile, default="", help="regular expression on the label of a case")
    add("--steps", type=int, default=5, help="timed steps in a row (5)")
    add("--repeats", type=int, default=3, help="how often; the median counts (3)")
    add("--offload-dir", type=Path, help="folder on the NVMe drive (a new one for temporary files)")
    add("--results", type=Path, default=RESULTS, help="where the page is written")
    add("--peak-tflops", type=float, help="dense bf16 peak of a device that is not known here")
    add("--compile-backend", default="inductor", help="of torch.compile (inductor)")
    add("--timeout", type=float, default=900.0, help="seconds that one case may take (900)")
    return parser


def _models(text: str) -> tuple[str, ...]:
    return _chosen(text, tuple(LOADS))


def _parts(text: str) -> tuple[str, ...]:
    return _chosen(text, PARTS)


def _chosen(text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"{text!r}: known are {', '.join(known)}")
    return names


def _session(options: argparse.Namespace, today: str) -> Session:
    """Look at the device, and return a session with nothing done yet."""
    if options.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        name, memory = properties.name, properties.total_memory
        driver = _driver()
    else:
        name, driver = f"CPU ({os.cpu_count()} cores): a rehearsal, no GPU", "none"
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    peak = options.peak_tflops * 1e12 if options.peak_tflops else peak_flops(name)
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower().partition("(")[0]).strip("-")
    return Session(
        options=options,
        machine=Machine(
            date=today, device=name, torch=torch.__version__, driver=driver, peak_flops=peak
        ),
        memory_bytes=memory,
        path=options.results / f"{today}-gpu-{slug}.md",
    )


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        ran = subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return ran.stdout.strip().splitlines()[0]


def _run_tests(session: Session) -> None:
    """Run the tests that need a GPU; what pytest says last is the result."""
    missing = [name for name in TEST_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        session.tests = f"not run: {' and '.join(missing)} not installed"
        return
    _say("tests/cuda")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/cuda"]
    ran = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    lines = ran.stdout.strip().splitlines()
    session.tests = lines[-1].strip("= ") if lines else ran.stderr.strip()[-200:]
    session.failed |= ran.returncode != 0
    _say(f"  {session.tests}")
    if ran.returncode:
        _say(ran.stdout + ran.stderr)


def _run_part(session: Session, part: str, cases: Sequence[Case]) -> None:
    """Measure the cases of a part on every chosen model that it is for."""
    options = session.options
    outcomes = session.outcomes.setdefault(part, [])
    models = [name for name in options.models if part == "training" or name in _offloaded(options)]
    for name in models:
        load = LOADS[name]
        sequences = load.fitting_sequences(int(USABLE * session.memory_bytes))
        for case in cases:
            if re.search(options.cases, case.label):
                _say(f"{part}: {name}, {case.label}")
                outcomes.append(_outcome(session, load, sequences, case))
                _say(f"  {outcomes[-1].row(session.machine.peak_flops)}")
                session.save()


def _offloaded(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the models that offload is measured on: one of middle size is enough."""
    return (OFFLOAD_LOAD,) if OFFLOAD_LOAD in options.models else options.models


def _outcome(session: Session, load: Load, sequences: int, case: Case) -> Outcome:
    """Measure one case; where it cannot run, say why."""
    if not sequences:
        needed = load.likely_bytes(1) / 1e9
        reason = f"needs about {needed:.0f} GB, there are {session.memory_bytes / 1e9:.0f}"
        return Outcome(load=load.name, sequences=1, case=case, reason=reason)
    options = session.options
    with tempfile.TemporaryDirectory(prefix="echelon-offload-", dir=options.offload_dir) as folder:
        settings = Settings(
            load=load.name,
            sequences=sequences,
            case=case,
            device=options.device,
            steps=options.steps,
            repeats=options.repeats,
            compile_backend=options.compile_backend,
            offload_dir=folder,
        )
        figures = _measured(settings, options.timeout)
    reason = figures.pop("skipped", "") or figures.get("failed", "")
    session.failed |= "failed" in figures
    return Outcome(load=load.name, sequences=sequences, case=case, figures=figures, reason=reason)


def _measured(settings: Settings, timeout_s: float) -> dict[str, Any]:
    """Run one measurement; what it printed, or how it ended."""
    command = [sys.executable, "-m", "bench.gpu.measure", settings.to_json()]
    try:
        ran = subprocess.run(
            command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"no result within {timeout_s:.0f} s"}
    for line in reversed(ran.stdout.splitlines()):
        if line.startswith(RESULT):
            return json.loads(line.removeprefix(RESULT))
    _say(ran.stderr)
    said = ran.stderr.strip().splitlines()
    return {"failed": f"ended with {ran.returncode}: {said[-1] if said else 'no output'}"[:300]}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
