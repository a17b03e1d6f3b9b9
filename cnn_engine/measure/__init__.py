"""Measurement: times, results, statistics, and the machine's state."""
