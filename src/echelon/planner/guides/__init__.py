"""What published guides advise, as data: trees, tables of sizes, preferences, best practices.

Each guide is walked for the reader's own model, cluster and batch: its questions are functions of
them (`questions.py`), its answers ranges of degrees (`strategy.py`) that are checked for fit
(`situation.py`) and compared with one another and with a plan (`agreement.py`).
"""
