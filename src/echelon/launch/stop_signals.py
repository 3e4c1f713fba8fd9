"""Turn Ctrl-C and SIGTERM into a request to stop at the next step boundary."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], object]

_REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Keep the first stop signal; a second Ctrl-C raises KeyboardInterrupt."""

    def __init__(self) -> None:
        """Nothing has come yet."""
        self.received: signal.Signals | None = None

    @property
    def requested(self) -> bool:
        """Return whether someone asked for a stop."""
        return self.received is not None

    def take(self, number: int, _frame: FrameType | None) -> None:
        """Take one signal."""
        if self.received is None:
            self.received = signal.Signals(number)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt


@contextmanager
def handle_stop_signals(handler: Handler) -> Iterator[None]:
    """Give stop signals to `handler` while the context is open.

    A signal that this process ignores stays ignored: `nohup` means what it says. Only the main
    thread of a process can catch signals; elsewhere nothing is changed.
    """
    before: dict[signal.Signals, signal._HANDLER] = {}
    if threading.current_thread() is threading.main_thread():
        for number in _REQUESTS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)
