"""Lowering: from a graph to passes, kernels, placement and reduced precision for a device."""
