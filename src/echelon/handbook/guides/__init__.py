# SPDX-License-Identifier: Apache-2.0
"""What published guides advise, as data: trees, tables of sizes, preferences, best practices.

advice.toml     tables: practices, the size guide, named layouts, kinds of strategies
situation.py    the reader's model, cluster and batch, and what the guides ask of them
strategy.py     an advice as ranges of degrees, and the split that it comes to
trees.py        the decision trees, and the way of a situation through one
practices.py    the size guide and named layouts; best practices and pitfalls with their lints;
                reasons to raise a degree; the tables of strategies with the reader's numbers;
                all advice for a situation, where it conflicts, and a plan differs
"""
