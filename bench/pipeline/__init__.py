"""Pipeline schedules beside their simulation, beside peers, over links, and searched."""
