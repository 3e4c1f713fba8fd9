# SPDX-License-Identifier: Apache-2.0
"""What a run leaves behind and shows while it runs: files that need no Echelon to be read.

Nothing here imports torch, and nothing below imports this: training names its observer
"echelon.telemetry.observer:observe_rank" and knows it by the `RunObserver` protocol only.

    run_directory.py    the folder of a run: made once, locked, opened
    observer.py         what a rank writes and prints, step by step
    console.py          the step line, its meters, and the progress bar
    live.py             a run while it goes on: what is new in its metrics
    json_lines.py       files of JSON lines, written and read
    events.py           events.jsonl.gz: what a rank sent and ran, of which steps
    routing.py          routing.jsonl: the experts that tokens chose, and where they piled up
    summary.py          what became of a run; rounds of islands, staleness of workers
    recorded_steps.py   single steps found in the events of a run
    timeline.py         a step of a pipeline, planned and measured; clocks of ranks put on one
    bubble.py           why ranks were idle
    bound.py            what binds a step: compute, memory, communication, data or bubble
    schedule_report.py  both timelines of a run, from its folder

Floors, each on those after it: summary > bound > schedule_report > bubble, observer >
routing, timeline > live, recorded_steps, trackers > events > console, json_lines, run_directory.
"""
