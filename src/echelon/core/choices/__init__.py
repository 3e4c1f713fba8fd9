# SPDX-License-Identifier: Apache-2.0
"""What users choose: optimizers, kinds of context parallelism, strategies, rows of replicas."""
