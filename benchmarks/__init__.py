"""Benchmarks against published figures, other libraries and hardware limits; results are in ``results/``."""
