"""How much of a model's behaviour a compressed prefix keeps: ``python -m benchmarks.fidelity``."""
