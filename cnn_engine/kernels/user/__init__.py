"""Kernels of a user's own: rows of the table that are not the project's."""

from .contracts import CONTRACTS, HEADER, Contract, structs
from .rows import from_callable, from_file

__all__ = ["CONTRACTS", "HEADER", "Contract", "from_callable", "from_file", "structs"]
