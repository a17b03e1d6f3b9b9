"""Graphs: networks, operators, shapes and passes. It knows no device."""
