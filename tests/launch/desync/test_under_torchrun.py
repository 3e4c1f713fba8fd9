"""Mistakes on ranks that torchrun started: no supervisor, no shared folder, only its store."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.desync.planted import Mistake

ROOT = Path(__file__).parents[3]
RINGS = Path("/dev/shm")
WORLD = 4

CASES = [
    ("tp-dp", Mistake(case="shape", rank=3, group="tensor", place=1)),
    *(
        pytest.param(*one, marks=pytest.mark.slow)
        for one in (
            ("dp", Mistake(case="operation", rank=2, group="data")),
            ("dp", Mistake(case="missing", rank=1, group="data", place=1)),
            ("pp-dp", Mistake(case="extra", rank=3, group="pipe_forward")),
            ("dp", Mistake(case="return", rank=2, group="")),
            ("dp", Mistake(case="exception", rank=2, group="")),
            ("dp", Mistake(case="loop", rank=3, group="")),
            ("dp", Mistake(case="cut", rank=2, group="data")),
        )
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "mistake"), CASES, ids=lambda one: getattr(one, "case", str(one))
)
def test_a_mistake_is_named_by_way_of_the_store(
    layout: str, mistake: Mistake, tmp_path: Path
) -> None:
    said = _run(layout, mistake, tmp_path)
    uncertain = mistake.case in ("loop", "cut")
    rank = mistake.rank
    # On a busy machine a rank may answer late: it is told as unheard, and asked again.
    kind = r"note" if uncertain else r"error\[[a-z-]+\]"
    unheard = r"(?!cannot be heard)"
    found = re.search(rf"{kind}: rank {rank} \(dp{rank}\): {unheard}.*", said)
    assert found is not None, said
    text = said[found.start() :]
    if mistake.case == "exception":
        # Each rank says for itself what it waited in.
        assert "ValueError: the planted error" in text
        lines = re.findall(r"it waited in .*, at \S+\.py:\d+ in \w+", said)
        assert len(lines) == WORLD - 1
    else:
        assert len(re.findall(r"(?:call|message) \d+ (?:of|from).*, at \S+:\d+ in", text)) >= 2
    ranks = [one.name.removeprefix("process-") for one in tmp_path.glob("process-*")]
    assert len(ranks) == WORLD
    # Rings of other processes come and go beside this test: a folder's name says whose it is.
    assert not [one for rank in ranks for one in RINGS.glob(f"echelon-calls-{rank}-*")]


def _run(layout: str, mistake: Mistake, folder: Path) -> str:
    argument = {
        "target": "tests.launch.desync.planted:train_wrongly",
        "layout": layout,
        "desync_s": 2.0,
        "step_s": 8.0 if mistake.case in ("loop", "cut") else 60.0,
        "mistake": {
            "case": mistake.case,
            "rank": mistake.rank,
            "group": mistake.group,
            "place": mistake.place,
        },
    }
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(WORLD), "--max-restarts", "0"),
        *("-m", "tests.launch.torchrun_script", json.dumps(argument), str(WORLD), str(folder)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/src:{ROOT}"}
    done = subprocess.run(
        command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 1
    return done.stderr
