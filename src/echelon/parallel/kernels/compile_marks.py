# SPDX-License-Identifier: Apache-2.0
"""Marks of progress while PyTorch's compiler is at work: a rank that compiles is not stuck.

The first call of each compiled piece takes seconds, on a loaded CPU minutes, in which the main
thread does not come to its next mark. PyTorch tells when a compilation begins and ends; a thread
marks in between.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from echelon.core.plan import Plan
from echelon.launch.context import COMPILING

EVERY_S = 1.0
"""Seconds between two marks."""
LONGEST_S = 1800.0
"""Seconds after which a compilation is marked no more: a rank may be stuck in it, too."""


class CompileMarks:
    """Mark every second in which PyTorch's compiler is at work, from its making until `close`."""

    def __init__(self, mark: Callable[[str], None]) -> None:
        """Tell `mark` what the rank is at."""
        # The package of the compiler takes long to load; it is needed with the first piece.
        from torch._dynamo.callback import callback_handler

        self._handler, self._mark = callback_handler, mark
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._handler.register_start_callback(self._begin)
        self._handler.register_end_callback(self._end)

    @classmethod
    def of_plan(cls, plan: Plan, mark: Callable[[str], None]) -> CompileMarks | None:
        """Return those of a plan whose pieces are compiled, else None."""
        kernels = plan.layout.kernels
        return cls(mark) if kernels.provider == "compiled" and kernels.fused else None

    def _begin(self, _: object) -> None:
        self._ended = threading.Event()
        self._mark(COMPILING)
        ended = self._ended
        self._thread = threading.Thread(target=self._tick, args=(ended,), daemon=True)
        self._thread.start()

    def _tick(self, ended: threading.Event) -> None:
        for _ in range(int(LONGEST_S / EVERY_S)):
            if ended.wait(EVERY_S):
                return
            self._mark(COMPILING)
        self._mark("compiling kernels for too long")

    def _end(self, _: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._mark("computing with compiled kernels")

    def close(self) -> None:
        """Mark nothing any more."""
        self._ended.set()
        self._handler.remove_start_callback(self._begin)
        self._handler.remove_end_callback(self._end)
