"""Plans per CPU-second of calculon's own search, where its package can be imported.

Source: github.com/calculon-ai/calculon, `calculon/llm/optimal_execution.py` at commit 1886c88. Its
search is a loop over splits; each call of it here is one split with everything that it varies, the
splits in random order, until the time is up.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

NUM_DEVICES, BATCH = 1024, 1536
MODEL, SYSTEM = "models/gpt3-175B.json", "systems/a100_80g.json"
RECOMPUTES = ("full", "attn_only", "none")
EXCHANGES = ("ar", "p2p_rs_ag", "rs_ag")


def calculon_plans_per_s(seconds: float) -> float | None:
    """Return how many plans calculon computes in a CPU-second; None where it is not here."""
    try:
        module = import_module("calculon.llm.optimal_execution")
        llm = import_module("calculon.llm")
    except ImportError:
        return None
    folder = Path(str(module.__file__)).parents[2]
    app = llm.Llm.Application(json.loads((folder / MODEL).read_text(encoding="utf-8")))
    system = llm.System(json.loads((folder / SYSTEM).read_text(encoding="utf-8")))
    splits = list(_splits(llm.Llm, app))
    random.Random(0).shuffle(splits)
    count, started = 0, time.process_time()
    for tp, pp, dp, interleaved, recompute, sharded, exchange in itertools.cycle(splits):
        batch = module.OptimalExecution.get_batch_size(dp, BATCH)
        split = (tp, pp, dp, interleaved, batch, recompute, sharded, exchange, False)
        fixed = (False, 1, False, NUM_DEVICES, BATCH, "float16", app, system)
        count += module.OptimalExecution.search(*fixed, *split)[1]
        if time.process_time() - started > seconds:
            break
    return count / (time.process_time() - started)


def _splits(llm: Any, app: Any) -> Iterator[tuple[Any, ...]]:
    for tp in llm.get_all_tensor_parallelisms(NUM_DEVICES, app.hidden, app.attn_heads):
        for pp in llm.get_all_pipeline_parallelisms(NUM_DEVICES, tp, app.num_blocks):
            dp = llm.get_data_parallelism(NUM_DEVICES, tp, pp)
            for interleaved in llm.get_valid_pipeline_interleavings(app.num_blocks, pp):
                for recompute, exchange in itertools.product(RECOMPUTES, EXCHANGES):
                    for sharded in (True, False) if dp > 1 else (False,):
                        yield tp, pp, dp, interleaved, recompute, sharded, exchange
