"""Passes that make one node of several which a kernel runs at once."""
