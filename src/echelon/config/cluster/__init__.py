# SPDX-License-Identifier: Apache-2.0
"""Clusters: names such as 8xh100+ndr, and files.

settings.py     the settings that name a cluster -> Cluster
file.py         a cluster file -> Cluster, and back; when and with what it was measured
devices.py      devices of the catalogue, and numbers that look like another unit
links.py        the catalogue of links; tiers that fit together, numbers that look wrong
"""
