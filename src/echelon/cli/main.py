# SPDX-License-Identifier: Apache-2.0
"""The entry point: runs one command, and says how an interrupted one ends.

Exit codes: 0 done; 1 ran, and the answer is no; 2 usage or configuration; 3 the environment lacks
something; 4 training failed; 70 a bug of Echelon's own, with its traceback; 75 stopped with a good
checkpoint, try again; 130 interrupted, by Ctrl-C or SIGTERM; 141 whoever read the output closed it.

Nothing is imported here that takes long: what is interrupted while it loads ends as quietly as what
is interrupted at work.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from echelon.launch.stop import EXIT_INTERRUPTED, stop_request

EXIT_PIPE_CLOSED = 141  # 128 + SIGPIPE


def main(tokens: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; a request to stop is one line, whenever it comes.

    Without `tokens` the process ends with this call.
    """
    with stop_request() as stop:
        try:
            code = _run([*(sys.argv[1:] if tokens is None else tokens)])
            if tokens is None:
                stop.end_with(code)
        except KeyboardInterrupt:
            code = EXIT_INTERRUPTED
            if stop.received is None:
                print("interrupted", file=sys.stderr, flush=True)
            if tokens is None:
                stop.end_with(code)
    return code


def _run(arguments: list[str]) -> int:
    from echelon.cli.app import run

    try:
        code = run(arguments)
        _flush()
    except BrokenPipeError:
        # Nothing more can be written: without this the interpreter complains again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE_CLOSED
    except OSError as error:
        from echelon.cli.output import report_refused

        return report_refused(error)
    return code


def _flush() -> None:
    """Write what is still to be written; a closed output (`>&-`) takes nothing, as with print."""
    if sys.stdout is not None:
        sys.stdout.flush()
