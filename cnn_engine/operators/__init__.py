"""The operators' specification, in NumPy float64."""
