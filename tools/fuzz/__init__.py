"""Random calls of all public functions, compared with plain implementations: `python -m tools.fuzz --help`."""
