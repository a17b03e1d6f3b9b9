"""Quantized networks: layers between DequantizeLinear and QuantizeLinear become layers of integers."""
