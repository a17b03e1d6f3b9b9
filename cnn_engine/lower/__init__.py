"""From a graph to what runs: rewrites for a device, kernels and places, reduced precision."""
