"""What the page on evaluation says of lm-eval, with lm-eval, where it is installed.

Tasks of others come from the hub; their lines are run with the page's own task in their place.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from echelon.cli.main import main
from tests.docs.readme import DOCS

PAGE = DOCS / "guides" / "fine-tuning" / "evaluate.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
OF_THE_HUB = "arc_easy,hellaswag"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("lm-eval") is None, reason="lm-eval is not on the PATH"),
]


@pytest.mark.timeout(1800)
def test_lm_eval_reads_what_is_exported_and_adapters_score_as_the_merged_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    bodies: dict[str, list[str]] = {}
    for language, body in FENCE.findall(PAGE.read_text(encoding="utf-8")):
        bodies.setdefault(language, []).append(body)
    for line in "".join(bodies["sh"]).splitlines():
        assert main(shlex.split(line)[1:]) == 0, line
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "own.yaml").write_text(bodies["yaml"][0], encoding="utf-8")
    (tmp_path / "questions.jsonl").write_text(bodies["json"][0], encoding="utf-8")
    lines = [one for one in "".join(bodies["text"]).splitlines() if one.startswith("lm-eval ")]
    assert sum(OF_THE_HUB in one for one in lines) == 3
    scores: dict[str, dict[str, float]] = {}
    for number, line in enumerate(lines):
        words = shlex.split(line.replace(OF_THE_HUB, "own --include_path tasks"))
        kept = words[: words.index("--output_path")] if "--output_path" in words else words
        out = tmp_path / f"results-{number}"
        device = [] if "--device" in kept else ["--device", "cpu"]
        done = subprocess.run(
            [*kept, *device, "--output_path", str(out)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (words, done.stderr)
        (found,) = out.rglob("results_*.json")
        arguments = words[words.index("--model_args") + 1]
        scores[arguments] = json.loads(found.read_text(encoding="utf-8"))["results"]["own"]
    merged = scores["pretrained=tuned,dtype=float32"]
    assert scores["pretrained=base,peft=tuned-adapters,dtype=float32"] == merged
    assert merged["sample_len"] == 2
    assert set(scores) > {"pretrained=base,dtype=float32"}
