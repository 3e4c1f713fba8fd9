"""What a run leaves behind and shows while it runs: files that need no Echelon to be read.

Nothing here imports torch, and nothing below imports this: training names its observer
"echelon.observe.observer:observe_rank" and knows it by the `RunObserver` protocol only.
"""
