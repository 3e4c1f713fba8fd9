# SPDX-License-Identifier: Apache-2.0
"""Run the command line: `python -m echelon`, and so `torchrun -m echelon train run.toml`."""

import sys

from echelon.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
