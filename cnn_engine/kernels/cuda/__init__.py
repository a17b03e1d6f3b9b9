"""Rows of the kernel table that run on CUDA alone."""
