# SPDX-License-Identifier: Apache-2.0
"""Collectives from messages: each algorithm makes the steps of one member, and one loop runs them.

Of an all-reduce, and but for the tree of a reduce-scatter and an all-gather, too.

steps             what a step is: elements sent to some members and received from others
ring              2 (n-1) steps around all members
tree              up a binomial tree, and down again
halving_doubling  halves exchanged by pairs, far ones first, and back
hierarchical      inside of nodes, across them, inside
run               runs the steps of an algorithm, in a thread beside the one that trains
"""
