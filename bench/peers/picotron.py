"""Modules of picotron, which is no package: from a clone in the folder of the peers.

They need no GPU once the `torch.cuda.synchronize` after each message does nothing.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch

from bench.harness.spec import NotApplicable


def picotron_module(name: str) -> Any:
    """Return `picotron.NAME` from a clone of https://github.com/huggingface/picotron."""
    clone = Path(sys.prefix).parent / "picotron"
    sys.path.insert(0, str(clone))
    try:
        found = importlib.import_module(f"picotron.{name}")
    except ImportError as error:
        raise NotApplicable(f"{error}: clone huggingface/picotron to {clone}") from error
    cuda: Any = torch.cuda
    cuda.synchronize = lambda *_, **__: None
    return found
