# SPDX-License-Identifier: Apache-2.0
"""A request to stop a command: said in one line at once, and kept until it is obeyed.

SIGINT (Ctrl-C), SIGTERM and SIGHUP ask for the same thing. One `StopRequest` takes them for the
whole process, from before its first import that takes long. What it does depends on the phase:

    at work     print "interrupted" and raise KeyboardInterrupt in the main thread
    noted       print "interrupted"; the code that starts ranks asks with `check`
    answered    print that the step is ended first; the code that answers stops with a result

A further Ctrl-C raises KeyboardInterrupt if none was raised yet, and else ends the process.

KeyboardInterrupt inside of an import is not safe: while libraries load, C++ code may swallow it
or call `std::terminate` (of 60 interrupts of `import torch`, one was lost, one aborted). So it is
raised where one Python module imports the next, or after the import.

Nothing is imported here that takes long.
"""

from __future__ import annotations

import os
import signal
import sys
from _thread import get_ident
from contextlib import contextmanager, suppress
from opcode import opmap

TYPE_CHECKING = False  # the import of typing would take most of the time of this import

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

EXIT_INTERRUPTED = 130
"""Exit code of a command that was asked to stop and keeps nothing: 128 + SIGINT, always."""
REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that ask for a stop."""

STOPPING = "{name}: stopping at the end of this step"
"""Line of a request that is answered with a result, behind its signal's name."""
_AT_ONCE = " (Ctrl-C again ends at once)"
_IMPORT_NAME = opmap["IMPORT_NAME"]
_BOOTSTRAP = "<frozen importlib._bootstrap>"
_RETRY_S = 0.05


class _Phase:
    """Hold the line of a request, and what it calls; without `obey` it raises KeyboardInterrupt.

    `answers`: the work then ends with a result. Without `repeats`, no second request interrupts.
    """

    __slots__ = ("answers", "line", "obey", "repeats")

    def __init__(
        self,
        line: str = "interrupted",
        obey: Callable[[], object] | None = None,
        *,
        answers: bool = False,
        repeats: bool = True,
    ) -> None:
        self.line, self.obey, self.answers, self.repeats = line, obey, answers, repeats


_AT_WORK = _Phase()
_NOTED = _Phase(obey=lambda: None)
_ANSWERED = _Phase(STOPPING, lambda: None, answers=True)


class StopRequest:
    """Take the signals of a process, and hold the request until it is obeyed."""

    def __init__(self) -> None:
        """Begin at work, with nothing requested."""
        self.received: signal.Signals | None = None
        """The first signal that came."""
        self.answered = False
        """Whether it came while somebody answers with a result."""
        self._phase = _AT_WORK
        self._raised = self._waiting = False
        self._pid, self._main = os.getpid(), get_ident()
        self._before: dict[signal.Signals, signal._HANDLER] = {}
        self._hook = sys.unraisablehook

    def take(self, number: int, frame: FrameType | None) -> None:
        """Take one signal."""
        if os.getpid() != self._pid:
            os._exit(EXIT_INTERRUPTED)  # A forked copy of this process; its parent prints the line.
        phase, first = self._phase, self.received is None
        if first:
            self.received = signal.Signals(number)
            self.answered = phase.answers
            if phase.line:
                again = _AT_ONCE if phase.answers and phase.repeats else ""
                say_at_once(phase.line.format(name=self.received.name) + again)
            if phase.obey is not None:
                phase.obey()
                return
        elif number != signal.SIGINT or not phase.repeats:
            return  # Launchers send several signals for one Ctrl-C.
        elif self._raised:
            os._exit(EXIT_INTERRUPTED)
        elif self.answered:
            say_at_once(_AT_WORK.line)
        self._raised = True
        self._interrupt(frame)

    def check(self) -> None:
        """Raise KeyboardInterrupt for a request that nobody answers."""
        if self.received is not None and not self.answered:
            self._raised = True
            raise KeyboardInterrupt

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Only note a request inside: the code there asks with `check`, and so does the end."""
        with self._in(_NOTED):
            self.check()
            yield
            self.check()

    @contextmanager
    def answered_by(
        self, obey: Callable[[], object], *, line: str = STOPPING, repeats: bool = True
    ) -> Iterator[None]:
        """Have requests inside answered with a result: `obey` asks for it.

        Without `repeats`, no further signal interrupts.
        """
        with self._in(_Phase(line, obey, answers=True, repeats=repeats)):
            yield

    def begin_answers(self) -> None:
        """Have requests answered from here on, to the end of the `noted` block."""
        if self._phase is _NOTED:
            self._phase = _ANSWERED

    @contextmanager
    def _in(self, phase: _Phase) -> Iterator[None]:
        before, self._phase = self._phase, phase
        try:
            yield
        finally:
            self._phase = before

    def install(self) -> None:
        """Take the signals that this process does not ignore: `nohup` means what it says."""
        for number in REQUESTS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self.take)
        self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._retry)
        self._hook, sys.unraisablehook = sys.unraisablehook, self._ignored

    def end_with(self, code: int) -> None:
        """Have every further request end the process with `code`: only the exit is left.

        KeyboardInterrupt for a request that could not raise it before.
        """
        if self._waiting:
            self._wait(on=False)
            raise KeyboardInterrupt
        for number in self._before:
            signal.signal(number, lambda *_: os._exit(code))
        self._before.clear()

    def uninstall(self) -> None:
        """Give the signals back."""
        self._wait(on=False)
        sys.unraisablehook = self._hook
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _interrupt(self, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt here, or where the import that is under way bears it."""
        if not _imports(frame):
            self._wait(on=False)
            raise KeyboardInterrupt
        self._wait(on=True)

    def _wait(self, *, on: bool) -> None:
        """Wait, or no longer, for a place where KeyboardInterrupt may be raised."""
        if on and not self._waiting:
            sys.meta_path.insert(0, self)
        elif self._waiting and not on:
            with suppress(ValueError):
                sys.meta_path.remove(self)
        if on or self._waiting:
            signal.setitimer(signal.ITIMER_REAL, _RETRY_S if on else 0.0)
        self._waiting = on

    def find_spec(self, _name: str, _path: Sequence[str] | None = None, _: object = None) -> None:
        """Raise KeyboardInterrupt where only Python code imports; as a finder, find nothing."""
        if self._waiting and get_ident() == self._main and _bears_interrupt(sys._getframe(1)):
            self._wait(on=False)
            raise KeyboardInterrupt

    def _retry(self, _number: int, frame: FrameType | None) -> None:
        if self._raised:
            self._interrupt(frame)

    def _ignored(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Raise a KeyboardInterrupt again that a callback of the interpreter lost."""
        if self._raised and issubclass(unraisable.exc_type, KeyboardInterrupt):
            self._wait(on=True)
        else:
            self._hook(unraisable)


def _imports(frame: FrameType | None) -> bool:
    """True if an import is under way in the frames from `frame` outwards."""
    while frame is not None:
        if frame.f_code.co_filename == _BOOTSTRAP:
            return True
        frame = frame.f_back
    return False


def _bears_interrupt(frame: FrameType | None) -> bool:
    """True if Python code, and no C or C++ code, began all imports in the frames."""
    while frame is not None:
        code, caller = frame.f_code, frame.f_back
        begins = code.co_filename == _BOOTSTRAP and code.co_name == "_find_and_load"
        if begins and caller is not None and caller.f_code.co_name != "_gcd_import":
            opcode = caller.f_code.co_code[caller.f_lasti] if caller.f_lasti >= 0 else None
            if opcode != _IMPORT_NAME:
                return False
        frame = caller
    return True


def say_at_once(text: str) -> None:
    """Print one line from a signal handler, over a progress bar that a terminal may show."""
    clear = "\r\x1b[K" if os.isatty(2) else ""
    with suppress(OSError):
        os.write(2, f"{clear}{text}\n".encode())


def current_request() -> StopRequest | None:
    """Return the object that takes this process's signals, if there is one."""
    for number in REQUESTS:
        owner = getattr(signal.getsignal(number), "__self__", None)
        if isinstance(owner, StopRequest):
            return owner
    return None


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Give the object that takes this process's signals; a new one for the block if there is none.

    Only the main thread can take signals; in other threads the new object takes none.
    """
    if (current := current_request()) is not None:
        yield current
        return
    request = StopRequest()
    import threading

    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    request.install()
    try:
        yield request
    finally:
        request.uninstall()


@contextmanager
def requests_held_back() -> Iterator[None]:
    """Hold requests back inside; a process that is started there begins without hearing any.

    Its first act is `ignore_requests`. This process gets the requests of the meantime afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_requests() -> None:
    """Leave requests to the process that started this one."""
    for number in REQUESTS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)
