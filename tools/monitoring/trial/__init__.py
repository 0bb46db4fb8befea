"""The dashboards' queries, rules and alerts, tried on a real stack under load."""
