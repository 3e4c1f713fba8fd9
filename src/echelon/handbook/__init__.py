# SPDX-License-Identifier: Apache-2.0
"""What published guides advise and claim, what of it holds, and what words mean.

guides/      what they advise, walked with the reader's model, cluster and batch
errata/      who wrote them, what they claim, and our formulas that show what holds
glossary.py  the words of the field as they are used here, glossary.toml those that no record says
"""
