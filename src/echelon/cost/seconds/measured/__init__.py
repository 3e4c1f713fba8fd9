# SPDX-License-Identifier: Apache-2.0
"""What was measured of our trainer on single devices: rates of its kernels, with their source."""
