# SPDX-License-Identifier: Apache-2.0
"""The command line: a small file for each command, which parses, calls and prints.

Results go to stdout and all else to stderr. Nothing here imports torch before a command needs it.

    main.py             the entry point: exit codes, interrupts, a closed output
    app.py              the table of commands, the parser, help, messages of all errors
    flags.py            flags that commands share, checks of the files that they name
    output.py           results, messages, errors, tables, wrapped text
    run_file.py         echelon init, config show, config presets
    other_tools.py      echelon import, export, export weights
    compare.py          echelon compare
    plan/               echelon plan: the page of a run, and searches
    prove.py            echelon prove
    train.py            echelon train
    observe.py          echelon observe
    calibrate.py        echelon calibrate, calibrate merge
    demo.py             echelon demo
    explain/            echelon explain: rules, and pages that compute
    schedule/           echelon schedule show, schedule check
    data.py             echelon data prepare, data show
    doctor.py           echelon doctor
"""
