"""See a plan: what ranks hold, where the seconds of a step go, where ranks sit.

Each picture is made of plain values, and is lines of text for a terminal or one SVG figure.
"""
