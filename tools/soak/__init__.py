"""Hours of serving, shortage and damage, in named scenarios: `python -m tools.soak --help`."""
