"""Formulas: bytes sent, bytes held. Each stands once, with its source; no torch."""
