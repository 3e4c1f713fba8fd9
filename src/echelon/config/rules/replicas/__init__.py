# SPDX-License-Identifier: Apache-2.0
"""Rules about replicas that do not sum gradients over ranks: islands, servers."""
