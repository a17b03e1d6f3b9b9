"""Measurements against published figures, peers and limits; ``results/`` holds what they found."""
