"""Everything that needs one CUDA GPU: `bench/gpu/run.sh`, which runs `python -m bench.gpu.run`.

tests: those of `tests/cuda`. training: steps of Llama-shaped models, eager and compiled, Echelon
with the machinery of ZeRO 0 and 3 beside plain PyTorch and transformers, and what the planner said.
kernels: products, attention and what is bound by memory. offload: to host memory and to files.
experts: one block of them. All of it ends within --budget seconds: a part gets its share of what
is left, and a case that no longer fits is named and left out. What is measured runs in a process of
its own, and the page in bench/results/ is written again after each. No network is used.
`--device cpu --models tiny` shows on any machine that it works. Exit 1 where a test fails or a case
ends in an error, 3 where torch sees no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.gpu.budget import LEAST_S, Budget, run_limited
from bench.gpu.loads import (
    LOADS,
    OFFLOAD,
    TRAINING,
    Case,
    Load,
    Settings,
    known_device,
    peak_flops,
)
from bench.gpu.measure import RESULT
from bench.gpu.report import Findings, Machine, Outcome, not_run, page
from bench.gpu.subjects import gpu_plan
from echelon.core.parameters import num_parameters
from echelon.core.plan import OffloadTarget
from echelon.planner.predict.estimate import estimate_plan

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
SHARES = {"tests": 1.0, "training": 4.0, "kernels": 0.8, "offload": 1.2, "experts": 0.8}
"""The parts in the order in which they run, and what each gets of the time."""

PARTS = tuple(SHARES)
MODELS = tuple(name for name in LOADS if name != "tiny")
OFFLOAD_LOADS = ("1b", "8b")
KERNEL_LOADS = ("1b", "8b")
EXPERT_SIZES = ("16384x2048x1408", "16384x4096x14336")
TINY_EXPERTS = "256x64x96"
TEST_PACKAGES = ("pytest", "pytest_timeout", "hypothesis")
BUDGET_S = 540.0
"""Seconds of a whole run: a minute is left of the ten that a lent machine gives a command."""

USABLE = 0.9
NO_GPU = 3


@dataclass(slots=True, kw_only=True)
class Session:
    """Hold the options of a run, and what came out so far."""

    options: argparse.Namespace
    machine: Machine
    memory_bytes: int
    path: Path
    budget: Budget
    texts: dict[str, list[str]] = field(default_factory=dict)
    case_s: dict[str, float] = field(default_factory=dict)
    tests: str = ""
    failed: bool = False
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)

    def save(self) -> None:
        """Write the page as it stands."""
        found = Findings(
            tests=self.tests,
            training=self.outcomes.get("training", ()),
            offload=self.outcomes.get("offload", ()),
            kernels="\n\n".join(self.texts.get("kernels", ())),
            experts="\n\n".join(self.texts.get("experts", ())),
        )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = self.path.with_suffix(".part")
        whole.write_text(page(self.machine, found), encoding="utf-8")
        whole.replace(self.path)


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
    for part in PARTS:
        if part in options.parts:
            session.budget.begin(part)
            _run_part(session, part)
            session.save()
    print(session.path.read_text(encoding="utf-8"))
    return 1 if session.failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench/gpu/run.sh", description=__doc__)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="where to run (cuda)")
    add("--models", type=_models, default=MODELS, help=f"of {', '.join(LOADS)} (all but tiny)")
    add("--parts", type=_parts, default=PARTS, help=f"of {', '.join(PARTS)} (all)")
    add("--cases", type=re.compile, default="", help="regular expression on the label of a case")
    add("--steps", type=int, default=5, help="timed steps in a row (5)")
    add("--repeats", type=int, default=3, help="how often; the median counts (3)")
    add("--offload-dir", type=Path, help="folder on the NVMe drive (a new one for temporary files)")
    add("--results", type=Path, default=RESULTS, help="where the page is written")
    add("--peak-tflops", type=float, help="dense bf16 peak of a device that is not known here")
    add("--compile-backend", default="inductor", help="of torch.compile (inductor)")
    add("--timeout", type=float, default=120.0, help="seconds that one case may take (120)")
    add("--budget", type=float, default=BUDGET_S, help=f"seconds of all of it ({BUDGET_S:.0f})")
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
    # Runs of other parts or models do not write over each other's pages.
    chosen = [part for part in PARTS if part in options.parts and len(options.parts) < len(PARTS)]
    chosen += [name for name in LOADS if name in options.models and options.models != MODELS]
    return Session(
        options=options,
        machine=Machine(
            date=today, device=name, torch=torch.__version__, driver=driver, peak_flops=peak
        ),
        memory_bytes=memory,
        path=options.results / f"{today}-gpu-{'-'.join([slug, *chosen])}.md",
        budget=Budget(
            options.budget, {part: SHARES[part] for part in PARTS if part in options.parts}
        ),
    )


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        ran = subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return ran.stdout.strip().splitlines()[0]


def _run_part(session: Session, part: str) -> None:
    if part == "tests":
        _run_tests(session)
    elif part == "training":
        _run_cases(session, part, TRAINING, session.options.models)
    elif part == "offload":
        _run_cases(session, part, OFFLOAD, _of(session, OFFLOAD_LOADS))
    elif part == "kernels":
        for name in _of(session, KERNEL_LOADS):
            _run_tables(session, part, ["--model", name])
    else:
        tiny = session.options.models == ("tiny",)
        for size in (TINY_EXPERTS,) if tiny else EXPERT_SIZES:
            _run_tables(session, part, ["--sizes", size])


def _of(session: Session, models: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of the chosen models that a part is for; only "tiny" rehearses everything."""
    chosen = session.options.models
    return chosen if chosen == ("tiny",) else tuple(name for name in models if name in chosen)


def _run_tests(session: Session) -> None:
    """Run the tests that need a GPU; what pytest says last is the result."""
    missing = [name for name in TEST_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        session.tests = f"not run: {' and '.join(missing)} not installed"
        return
    _say("tests/cuda")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/cuda"]
    limit_s = session.budget.left_s
    ran = run_limited(command, limit_s=limit_s, cwd=ROOT)
    lines = (ran.stdout.strip() or ran.stderr.strip()).splitlines() or ["no output"]
    said = lines[-1].strip("= ")[-200:]
    if ran.code is None:
        said = f"stopped after {limit_s:.0f} s, at: {said}"
    session.tests = said
    session.failed |= ran.code != 0
    _say(f"  {said}")
    if ran.code:
        _say(ran.stdout + ran.stderr)


def _run_tables(session: Session, part: str, arguments: Sequence[str]) -> None:
    """Run the command of a part, which prints tables; keep those that it came to."""
    options = session.options
    texts = session.texts.setdefault(part, [])
    what = " ".join(arguments[1:])
    _say(f"{part}: {what}")
    limit_s = min(options.timeout, session.budget.left_s)
    if limit_s < LEAST_S:
        texts.append(f"{what}: not run: no time is left")
        return
    command = [sys.executable, "-m", f"bench.gpu.{part}", "--device", options.device, *arguments]
    command += ["--steps", str(options.steps), "--repeats", str(options.repeats)]
    ran = run_limited(command, limit_s=limit_s, cwd=ROOT)
    texts.extend([ran.stdout.strip()] * bool(ran.stdout.strip()))
    if ran.code != 0:
        session.failed = True
        _say(ran.stderr)
        last = (ran.stderr.strip().splitlines() or ["see the rows above"])[-1][:200]
        ended = f"stopped after {limit_s:.0f} s" if ran.code is None else f"ended with {ran.code}"
        texts.append(f"{what}: {ended}: {last}")
    session.save()


def _run_cases(session: Session, part: str, cases: Sequence[Case], models: Sequence[str]) -> None:
    """Measure the cases of a part on its models: one case on all of them, then the next."""
    outcomes = session.outcomes.setdefault(part, [])
    chosen = [case for case in cases if re.search(session.options.cases, case.label)]
    for case in chosen:
        for name in models:
            _say(f"{part}: {name}, {case.label}")
            outcomes.append(_outcome(session, LOADS[name], case))
            _say(f"  {outcomes[-1].row(session.machine.peak_flops)}")
            session.save()


def _outcome(session: Session, load: Load, case: Case) -> Outcome:
    """Measure one case; where it cannot run, say why."""
    options = session.options
    usable = int(USABLE * session.memory_bytes)
    sequences = load.fitting_sequences(usable) or load.fitting_sequences(usable, case.state_bytes)
    reason = "" if sequences else _too_large(load.likely_bytes(1, case.state_bytes), usable, "")
    reason = reason or _no_room(session, load, case)
    limit_s = min(options.timeout, session.budget.left_s)
    if not reason and limit_s < max(LEAST_S, session.case_s.get(load.name, 0.0)):
        reason = "no time is left"
    if reason:
        return Outcome(load=load.name, sequences=max(1, sequences), case=case, reason=reason)
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
        figures = _measured(session, settings, limit_s)
        predicted_s, predicted_bytes = predicted(settings, session.machine.device)
    reason = figures.pop("skipped", "") or figures.get("failed", "")
    session.failed |= "failed" in figures
    return Outcome(
        load=load.name,
        sequences=sequences,
        case=case,
        figures=figures,
        reason=reason,
        predicted_s=predicted_s,
        predicted_bytes=predicted_bytes,
    )


def predicted(settings: Settings, device_name: str) -> tuple[float | None, float | None]:
    """Return the planner's seconds of a step and its peak of tensors, of our own trainer only."""
    known = known_device(device_name)
    if known is None or settings.case.framework != "echelon":
        return None, None
    found = estimate_plan(gpu_plan(settings, known))
    return found.step_s, found.allocated_bytes


def _no_room(session: Session, load: Load, case: Case) -> str:
    """Return why what rests outside of the GPU has no room there; empty where it has."""
    count = num_parameters(load.shape)
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    disk = shutil.disk_usage(session.options.offload_dir or tempfile.gettempdir()).free
    rooms: tuple[tuple[OffloadTarget, int, str], ...] = (
        ("host", host, " in host memory"),
        ("nvme", disk, " on disk"),
    )
    for home, size, where in rooms:
        if case.bytes_at(home) * count > USABLE * size:
            return _too_large(case.bytes_at(home) * count, int(USABLE * size), where)
    return ""


def _too_large(needed: int, usable: int, where: str) -> str:
    return f"needs about {needed / 1e9:.0f} GB{where}, there are {usable / 1e9:.0f}"


def _measured(session: Session, settings: Settings, limit_s: float) -> dict[str, Any]:
    """Run one measurement; what it printed, or how it ended."""
    command = [sys.executable, "-m", "bench.gpu.measure", settings.to_json()]
    ran = run_limited(command, limit_s=limit_s, cwd=ROOT)
    if ran.code is None:
        return {"failed": f"no result within {limit_s:.0f} s"}
    slowest = max(ran.seconds, session.case_s.get(settings.load, 0.0))
    session.case_s[settings.load] = slowest
    for line in reversed(ran.stdout.splitlines()):
        if line.startswith(RESULT):
            return json.loads(line.removeprefix(RESULT))
    _say(ran.stderr)
    said = ran.stderr.strip().splitlines()
    return {"failed": f"ended with {ran.code}: {said[-1] if said else 'no output'}"[:300]}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    # `timeout` sends this: the case that runs is in a session of its own, and must end, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
