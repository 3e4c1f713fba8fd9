"""Operations on tensors that have no elements: what the host reads is written down, and made up.

A number that the host reads from the device is one; a copy to the host holds ones. Where elements
decide a shape there is nothing to make up: an error names the operation.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.rehearse.log import RankLog

_PACKAGE = Path(__file__).parents[1]
_READS = frozenset({"_local_scalar_dense", "item"})
_COPIES = frozenset({"_to_copy", "copy_"})


class ShapesOnly(TorchDispatchMode):
    """Run what a rank runs on the meta device; count operations and write down host reads."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing here is compiled, and torch would import its compiler to say so."""
        return False

    def __init__(self, log: RankLog) -> None:
        """Write into `log`."""
        super().__init__()
        self.log = log
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, or make up what the host reads of it."""
        kwargs = kwargs or {}
        name = func._schema.name.rpartition("::")[2]
        if name in _READS and _is_shape(args[0]):
            self._read(name)
            return torch.ones((), dtype=args[0].dtype).item()
        if name in _COPIES:
            source = args[1] if name == "copy_" else args[0]
            target = args[0].device if name == "copy_" else kwargs.get("device", source.device)
            if _is_shape(source) and torch.device(target).type == "cpu":
                self._read(name)
                if name == "copy_":
                    return args[0].fill_(1)
                return torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        if not func.is_view:
            self.counts[name] += 1
        return func(*args, **kwargs)

    def _read(self, operation: str) -> None:
        self.log.host_read(operation, _caller())


def _is_shape(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


def _caller() -> str:
    """Return the innermost place in this package that is not the rehearsal itself."""
    here = str(Path(__file__).parent)
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.startswith(str(_PACKAGE)) and not frame.filename.startswith(here):
            return f"{Path(frame.filename).relative_to(_PACKAGE)}:{frame.lineno}"
    return ""
