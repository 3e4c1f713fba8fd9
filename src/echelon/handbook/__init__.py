"""What published guides advise and claim, and what of it holds.

sources.py   the guides: author, title, year, and the key by which all else names them
guides/      what they advise, walked with the reader's model, cluster and batch
errata/      what they claim, and our formulas that show what holds
"""
