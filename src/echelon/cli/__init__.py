# SPDX-License-Identifier: Apache-2.0
"""The command line: a file for each command, which parses, calls and prints.

Results go to stdout and all else to stderr. Nothing here imports torch before a command needs it.

    main.py             the entry point: exit codes, interrupts, a closed output
    app.py              the table of commands, the parser, help, messages of all errors
    flags.py            flags that commands share, files that `--out` names
    output.py           results, errors, notes, progress
    run_file.py         echelon init, config show, config presets
    other_tools.py      echelon import, export, export weights
    compare.py          echelon compare
    plan.py             echelon plan: the page of a run, and searches; echelon explore
    rehearse.py         echelon rehearse
    prove.py            echelon prove
    train.py            echelon train
    generate.py         echelon generate
    observe.py          echelon observe
    calibrate.py        echelon calibrate, calibrate merge
    demo.py             echelon demo
    explain/            echelon explain: rules, and pages that compute
    schedule/           echelon schedule show, schedule check
    data.py             echelon data prepare, data show, data look
    doctor.py           echelon doctor
"""
