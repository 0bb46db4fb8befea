"""The front door: validates, plans, admits by device memory, and delivers each token once."""
