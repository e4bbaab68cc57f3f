"""Benchmarks: each prints a table and writes JSON to bench/results. Not part of `make test`."""
