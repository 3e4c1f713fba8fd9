"""Predicted beside measured steps of plans on this machine: which plans, and the report."""
