"""Published production choices beside what the planner would choose for the same run."""
