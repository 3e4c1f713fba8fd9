# SPDX-License-Identifier: Apache-2.0
"""What published guides advise and claim, what of it holds, and what words mean.

sources.py   the guides: author, title, year, and the key by which all else names them
guides/      what they advise, walked with the reader's model, cluster and batch
errata/      what they claim, and our formulas that show what holds
glossary.py  the words of the field as they are used here, glossary.toml those that no record says
"""
