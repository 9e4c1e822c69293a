"""Benchmarks: `python -m bench attention`, `python -m bench plots`, `python -m bench readme`."""
