# SPDX-License-Identifier: Apache-2.0
"""What a run leaves behind and shows while it runs: files that need no Echelon to be read.

Nothing here imports torch, and nothing below imports this: training names its observer
"echelon.telemetry.observer:observe_rank" and knows it by the `RunObserver` protocol only.

    run_directory.py    the folder of a run: made once, locked, opened
    observer.py         what a rank writes and prints, step by step
    console.py          the step line and the progress bar
    meters.py           tokens per second, time left, memory
    json_lines.py       files of JSON lines, written and read
    events.py           events.jsonl.gz: what a rank sent and ran
    sampling.py         the steps whose events are kept, within a budget of bytes
    routing.py          routing.jsonl: the experts that tokens chose, and where they piled up
    summary.py          what became of a run
    recorded_steps.py   single steps found in the events of a run
    clock_alignment.py  the clocks of ranks put on one
    timeline.py         a step of a pipeline, planned and measured
    bubble.py           why ranks were idle
    bound.py            what binds a step: compute, memory, communication, data or bubble
    trace.py            timelines as Chrome traces
    schedule_report.py  both timelines of a run, from its folder
"""
