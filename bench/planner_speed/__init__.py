"""How fast the planner searches, beside calculon where it can be imported."""
