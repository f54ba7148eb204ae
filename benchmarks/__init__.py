"""Studies that are too slow or too noisy for tests; each is ``python -m benchmarks.NAME --help``."""
