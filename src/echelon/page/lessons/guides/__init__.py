# SPDX-License-Identifier: Apache-2.0
"""Lessons that are guides: which split, how bytes come about, what was said wrong, what words mean.

expand.py           a decision tree as a figure, with the path that was taken
which_split.py      the tree of questions by its answers, and models that go through all trees
memory_guide.py     how 7B parameters become 112 GB
weights_guide.py    how weights are stored, and why products can be shared out
attention_guide.py  what attention needs, and why a long sequence breaks one device
published.py        every claim of the guides that is wrong, with what holds
words.py            the words of the field, as they are used here
"""
