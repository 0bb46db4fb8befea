"""`python -m splitpoint_cli`, for source trees that are not installed."""

from splitpoint_cli.main import main

main()
