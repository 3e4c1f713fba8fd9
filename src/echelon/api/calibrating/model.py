# SPDX-License-Identifier: Apache-2.0
"""`ec.calibrate_model`: how long the units of a model take here, as a file for balancing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from echelon.config.files.new_file import require_writable, write_new
from echelon.config.files.reading import is_file, is_folder
from echelon.config.files.times_file import TimesFile
from echelon.config.load import load_job
from echelon.config.rules.plan import require_trainable
from echelon.core.errors import ConfigError
from echelon.core.optional import optional_package
from echelon.core.rulebook.pipeline import UNIT_TIMES_WRITTEN_ONCE
from echelon.launch.host import num_usable_cores

MEASURED_FOR_S = 3.0


def calibrate_model(
    run: str | Path,
    *,
    settings: Sequence[str] = (),
    out: str | Path,
    seconds: float = MEASURED_FOR_S,
) -> TimesFile:
    """Measure embedding, block and head of a run's model on this machine, and write them to `out`.

    Each is measured on one rank with the threads (on a GPU: the device) that a rank of the run
    would have here. Raises, before anything is measured, ConfigError where the run is wrong or
    `out` is there already or cannot be written, EnvironmentProblem where the run is for GPUs and
    there is none.
    """
    path = Path(out)
    _require_new(path)
    require_writable(path, key="--out")
    job = load_job(run, [*settings, 'pipeline.times="none"'])
    require_trainable(job.plan, job.sources)
    optional_package("torch", extra="train", purpose="measuring a model")
    import torch

    from echelon.launch.process_group import require_devices
    from echelon.launch.room import require_kernels
    from echelon.training.measure.unit_times import measure_units

    backend = job.plan.cluster.backend
    require_devices(backend, 1, set_by=job.source_of("cluster.preset"))
    require_kernels(job.plan.layout.kernels, backend, set_by=job.source_of("kernels.provider"))
    device = torch.device("cuda" if backend == "nccl" else "cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, int(num_usable_cores()) // job.plan.mesh.world_size))
    try:
        times = measure_units(job.plan, device, seconds=seconds)
    finally:
        torch.set_num_threads(before)
    write_new(path, times.to_json() + "\n", key="--out")
    return times


def _require_new(path: Path) -> None:
    if not is_file(path) and not is_folder(path):
        return
    first = path / "times.json" if is_folder(path) else path
    others = (first.with_stem(f"{first.stem}-{n}") for n in range(2, 10_000))
    free = next(other for other in (first, *others) if not other.exists())
    what = "is a folder" if is_folder(path) else "is there already"
    raise ConfigError(
        UNIT_TIMES_WRITTEN_ONCE.problem(
            f"{path} {what}, and measured times are never overwritten",
            key="--out",
            set_by=f"--out {path}",
            suggestions=(f"--out {free}",),
        )
    )
