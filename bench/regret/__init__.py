"""Parts of `bench/planner_regret.py`: which plans, how long they take, and the report."""
