# SPDX-License-Identifier: Apache-2.0
"""Clusters: names such as 8xh100+ndr, and files.

settings.py     the settings that name a cluster -> Cluster
file.py         a cluster file -> Cluster, and back
calibration.py  when and with what a file was measured
devices.py      devices of the catalogue, and numbers that look like another unit
links.py        the catalogue of links
link_checks.py  tiers that fit together, and numbers of links that look wrong
"""
