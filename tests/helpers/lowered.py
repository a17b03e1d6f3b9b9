"""Parts of the pipeline by themselves, for tests of single rewrites."""

from __future__ import annotations

from types import SimpleNamespace

from cnn_engine.graph.graph import Graph
from cnn_engine.lower import pipeline


def fuse(graph: Graph) -> Graph:
    """Returns the graph with additions and functions as epilogues of the convolutions before them."""
    setting = pipeline.Setting(SimpleNamespace(kind="cpu"))
    return pipeline.lower(graph, setting, (pipeline.FUSE,)).graph


def lay_channels_last(graph: Graph, device: str = "cpu", run: int = 4) -> Graph:
    """Returns the graph with images [N, H, W, C] between convolutions, before kernels are asked.

    Args:
        run: channels that a convolution reads at once on CUDA: 8 where values lie in memory in 16 bits.
    """
    dtype = "float16" if run == 8 else "float32"
    setting = pipeline.Setting(SimpleNamespace(kind=device), dtype)
    entries = pipeline.LAY_OUT_ON_CPU, pipeline.LAY_OUT_ON_CUDA
    return pipeline.lower(graph, setting, entries).graph
