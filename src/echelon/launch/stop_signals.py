"""Turn Ctrl-C and SIGTERM into a request to stop at the next step boundary."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType

_REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Catch stop signals while the context is open: the first asks, a second Ctrl-C interrupts.

    Only the main thread of a process can do this; elsewhere nothing is caught.
    """

    def __init__(self) -> None:
        """Catch nothing yet."""
        self.requested = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignals:
        """Start to catch."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._take) for number in _REQUESTS}
        return self

    def __exit__(self, *_: object) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.requested:
            self.requested = True
            name = signal.Signals(number).name
            print(
                f"{name}: stopping at the end of this step (Ctrl-C again ends at once)",
                file=sys.stderr,
                flush=True,
            )
