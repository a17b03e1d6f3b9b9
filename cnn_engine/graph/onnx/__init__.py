"""ONNX files as graphs: :func:`load`.

The package ``onnx`` parses; everything that a file claims is checked before it is believed.
"""

from .reading import load
from .refusal import UnsupportedNode, UnsupportedNodesError

__all__ = ["UnsupportedNode", "UnsupportedNodesError", "load"]
