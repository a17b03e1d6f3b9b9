"""Rows of the kernel table that run on the CPU alone."""
