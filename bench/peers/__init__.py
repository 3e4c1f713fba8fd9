"""One file per peer; each has `build(settings) -> step function` and runs in the peers' venv."""
