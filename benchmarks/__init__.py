"""Measurements, each `python -m benchmarks.NAME [--json]`: a table, or one JSON line a row."""
