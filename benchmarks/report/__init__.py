"""All results on one page: ``python -m benchmarks.report``."""
