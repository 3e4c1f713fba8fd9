"""Hypothesis without a deadline: no test asserts a wall-clock time, a busy machine least of all."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
