"""The planner: split points, schedules and weight placement, as pure functions."""
