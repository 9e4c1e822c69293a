"""Top-k of rows: rows -> keys -> select <-> scope -> emit. One source for all public functions and architectures."""
