"""From a graph to what runs: rewrites for a device, kernels and positions, reduced precision."""
