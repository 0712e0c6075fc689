"""Benchmarks: each writes `benchmarks/NAME.json` and a table made from it."""
