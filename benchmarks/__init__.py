"""Benchmarks: `python benchmarks/run.py --help`. Not part of the test suite."""
