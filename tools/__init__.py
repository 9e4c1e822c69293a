"""Command-line tools: `python -m tools.aot` builds bundles, tools/inspect.py reads cubins."""
