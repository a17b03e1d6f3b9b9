"""Rows of the kernel table for the CPU."""
