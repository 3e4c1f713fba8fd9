"""A path or a function that is not there is said before torch is imported or a rank is started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MISSING = {
    "prove nano --module nofile.py:make": "verify-file",
    "prove nano --module program.py:make": "verify-file",
    "prove nano --module program.py": "verify-file",
    "prove nano --module broken.py:make": "verify-raised",
    "prove --subject nofile.py": "verify-file",
    "prove --subject program.py": "verify-file",
    "prove --subject nofolder/program.py": "verify-file",
    "prove nano --subject nowhere.engine:make": "prove-subject",
    "prove nano --subject nowhere": "prove-subject",
    "prove nofolder/run.toml": "no-such-file",
    "train nofile.toml": "no-such-file",
    "train nano --resume nofolder": "checkpoint-exists",
    "train nano --set train.weights=nofile": "weights-file-exists",
    "train nano --set data.source=nofile": "data-source-unreadable",
    "train nano --set data.tokenizer=nofile.json": "tokenizer-known",
    "generate nofolder --prompt x": "run-exists",
    "generate nofolder --prompt-file nofile": "bad-argument",
    "observe nofolder": "run-exists",
    "export nofile.toml --to megatron": "no-such-file",
    "export weights nofolder --to hf --out out": "run-exists",
    "import nofile.yaml": "no-such-file",
    "data prepare nofile --out out": "data-source-unreadable",
    "data prepare program.py --tokenizer nofile.json --out out": "tokenizer-known",
    "data show nofolder": "data-prepared",
    "data look nofolder": "data-prepared",
    "rehearse nofile.toml": "no-such-file",
    "calibrate nofile.toml --out out.json": "no-such-file",
    "calibrate merge a.toml b.toml --out out.toml": "no-such-file",
    "compare nofile.toml nano": "no-such-file",
    "schedule check nofile.csv": "no-such-file",
    "plan nano --cluster nofile.toml": "no-such-file",
    "plan nano --set model.hf_config=nofile.json": "no-such-file",
    "plan nano --set mesh.pp=2 --set pipeline.times=nofile.json": "no-such-file",
    "init --extends nofile.toml": "no-such-file",
}
"""Each command with a path to nothing, and the rule that says so."""

WALK = """
import json, sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from echelon.cli.main import main
told = {}
for command in json.loads(sys.stdin.read()):
    error = StringIO()
    with redirect_stderr(error), redirect_stdout(StringIO()):
        code = main(command.split())
    told[command] = code, "torch" in sys.modules, error.getvalue()
print(json.dumps(told))
"""


def test_paths_are_checked_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import torch\n\n\ndef build():\n    return torch\n")
    (tmp_path / "broken.py").write_text("def make(:\n")
    done = subprocess.run(
        [sys.executable, "-c", WALK],
        cwd=tmp_path,
        input=json.dumps([*MISSING]),
        capture_output=True,
        text=True,
        check=True,
    )
    for command, (code, torch_is_there, error) in json.loads(done.stdout).items():
        assert code == 2, (command, error)
        assert f"error[{MISSING[command]}]" in error, (command, error)
        assert not torch_is_there, command
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.py", "program.py"]


def test_a_function_with_another_name_is_proposed(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("def make_model():\n    pass\n")
    command = [sys.executable, "-m", "echelon", "prove", "--module", "program.py:make"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "program.py has no function make" in done.stderr
    assert "works here: make_model" in done.stderr
