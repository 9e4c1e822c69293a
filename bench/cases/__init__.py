"""Cases and their inputs, shared by benchmarks, tests and tools."""
