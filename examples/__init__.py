"""Programs to copy from: run as `python -m examples.NAME`."""
