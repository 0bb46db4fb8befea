"""Programs that make what the repository holds: locks, pictures, models, charts, trials."""
