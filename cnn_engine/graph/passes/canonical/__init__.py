"""Passes for every device: one canonical form, and fewer nodes."""
