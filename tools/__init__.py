"""Command-line tools: run as `python -m tools.NAME`."""
