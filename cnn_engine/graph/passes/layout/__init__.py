"""Passes that lay images and weights out as the fastest kernels read them."""
