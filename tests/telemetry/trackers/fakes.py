"""Packages of trackers that hang, crash, fail and flood, in the place of the real ones."""

from __future__ import annotations

from pathlib import Path

HANGS = "import time\ntime.sleep(3600)\n"
CRASHES = "import os\nos._exit(9)\n"
FLOODS = """
import os
while True:
    os.write(1, b"x" * 65536)
"""
FAILS = {
    "__init__.py": "",
    "entities.py": "Metric = Param = RunTag = lambda *values: values\n",
    "tracking.py": """
class MlflowClient:
    def __getattr__(self, name):
        def call(*values, **named):
            raise ConnectionError(f"{name}: no route to host")
        return call
""",
}


def install_fakes(folder: Path) -> Path:
    """Write the packages into a folder that stands first on PYTHONPATH; return it."""
    for name, text in (("tensorboard", HANGS), ("wandb", CRASHES), ("trackio", FLOODS)):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(text)
    (folder / "mlflow").mkdir()
    for name, text in FAILS.items():
        (folder / "mlflow" / name).write_text(text)
    return folder
