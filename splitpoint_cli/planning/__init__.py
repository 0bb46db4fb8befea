"""Commands that plan before a start: plan and size."""
