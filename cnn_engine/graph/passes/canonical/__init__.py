"""Passes for every device: one form for what can be written in several, and less to run."""
