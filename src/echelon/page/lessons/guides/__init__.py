# SPDX-License-Identifier: Apache-2.0
"""Lessons that are guides: a choice of splits, derivations of bytes, errata, words.

which_split.py      the tree of questions by its answers, and models that go through all trees
memory.py           how 7B parameters become 112 GB, how weights are stored and shared out
attention.py        the bytes of attention, and why a long sequence breaks one device
glossary.py         the words of the field, and every claim of the guides that is wrong
"""
