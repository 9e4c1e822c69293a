"""Calls of every kernel structure under compute-sanitizer, in pieces that end: `python -m tools.sanitize --help`."""
