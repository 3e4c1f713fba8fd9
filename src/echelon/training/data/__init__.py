# SPDX-License-Identifier: Apache-2.0
"""Turn text into memory-mapped token shards, and read the same samples under every layout.

sources.py     the files of a corpus, in their order
urls.py        files behind URLs, as streams that go on where they broke off
records.py     the documents of one file, piece by piece
chats.py       chats by the template of a tokenizer, with their answers told apart
tokenizer.py   bytes, byte-pair encoding, or a tokenizer.json
prepare.py     sources to token shards; the built-in corpus
writer.py      the folder of prepared data, committed by rename
index.py       index.json: every file with its size and hash
corpus.py      the data of a run, prepared once and found by its content
mixed_dataset.py  several prepared sources, read as one: which sequence is of which
look.py        what is in prepared data, and in a sample of a step
dataset.py     samples through a memory map
batches.py     the samples of a step, and each rank's share
feed.py        the batches of each step on the device, copied while the one before computes
beside_weights.py  the tokenizer and its files, beside weights that leave
"""
