"""Chooses the images of a pass and of a chunk where the caller names none.

By rule and not by measurement: a first call costs no more than the next one, and every run does the same. The
constants come from docs/explanation/performance.md and ``python -m benchmarks.plain_call``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from ..graph.graph import Graph
from .memory import alive_between

#: Images of a whole wave of the fused kernels, for each multiprocessor: a block has 2 teams in float32 and 5
#: in float16, each with an image of its own, and what does not divide leaves teams idle.
WAVE = 10
WAVES = 3

#: The first chunk's copy and the last one's kernel overlap with nothing.
CHUNKS_A_PASS = 8
CHUNK_BYTES = 16 << 20

#: From pageable memory a chunk is staged by the host's threads before it is copied: more and smaller chunks
#: of a short pass overlap more of that, and larger ones of a long pass start the threads less often.
PAGEABLE_WAVE = WAVE // 2
PAGEABLE_WAVES = 12
PAGEABLE_CHUNKS_A_PASS = 15
PAGEABLE_CHUNK_BYTES = 32 << 20

#: Chunks below this are staged past the caches: else they still lie in those of single cores when the bus
#: comes, which reads them from there at half of its rate. Of larger ones three on their way drive each other
#: out (of 16 cores' 2 MiB each) into the cache that cores share: the bus reads that as fast as memory, which
#: then has less to move, and limits long passes.
PAST_CACHES_BYTES = 9 << 20

#: Past so many chunks, filling and draining a pass costs nothing that can be measured.
MOST_CHUNKS = 256

#: Bytes between layers that passes on a GPU may take, unless a single image takes more; and the part of a
#: card's memory that they may.
GPU_ACTIVATIONS = 1 << 30
GPU_PART = 32

#: Images of a pass on a GPU whose copies overlap with nothing.
GPU_BYTES = 256 << 20

#: Images per pass on the CPU: enough to share out, few enough for its caches and for Ctrl-C to be heard.
CPU_FUSED = 1024
CPU_FUSED_A_THREAD = 64
CPU_LAYERED = 64
CPU_LEAST = 4
CPU_ACTIVATIONS = 32 << 20

#: Images per pass in the data modes that show what copies cost.
TO_SHOW = 100


@dataclass(frozen=True)
class Schedule:
    """The rule for one engine.

    Attributes:
        data_mode: ``auto`` lets copies overlap with kernels where a pass has several chunks.
        image_bytes: of an image that comes as uint8 pixels.
        activation_bytes: between layers, of an image; 0 where the network is one kernel.
        threads: of the CPU.
        multiprocessors: of the GPU; 0 on the CPU.
        memory: bytes of the GPU's memory.
        fused_layers: whether the first layers, with most of the work, are one kernel.
    """

    data_mode: str
    image_bytes: int
    activation_bytes: int
    threads: int
    multiprocessors: int = 0
    memory: int = 0
    fused_layers: bool = False

    @classmethod
    def of(
        cls, graph: Graph, batch: int, covered: int, device: Any, data_mode: str, threads: int,
        fused_layers: bool,
    ) -> Schedule:  # fmt: skip
        """Returns the rule for a graph of ``batch`` images whose first ``covered`` nodes are one kernel."""
        # What a kernel over a chain makes lies in memory for the nodes after it, if there are any.
        nodes = graph.nodes[max(covered - 1, 0) :] if covered < len(graph.nodes) else ()
        image = math.prod(graph.inputs[0].shape) if graph.inputs else 1
        if device.kind == "cuda":
            between = alive_between(graph, nodes)
            sizes = device.properties["multiprocessors"], device.properties["total_memory"]
        else:
            between = sum(graph.values[name].nbytes for node in nodes for name in node.outputs)
            sizes = 0, 0
        image_bytes, activation_bytes = max(image // max(batch, 1), 1), between // max(batch, 1)
        return cls(data_mode, image_bytes, activation_bytes, threads, *sizes, fused_layers)

    def scaled(self, nbytes: int, images: int, item_bytes: int) -> Schedule:
        """Returns the rule for images of another size: so many bytes, in elements of ``item_bytes``."""
        elements = max(nbytes // item_bytes // max(images, 1), 1)
        between = self.activation_bytes * elements // self.image_bytes
        return replace(self, image_bytes=elements, activation_bytes=between)

    def _bytes(self, pixels: bool) -> int:
        return self.image_bytes * (1 if pixels else 4)

    def _most_between_layers(self) -> int:
        most = min(GPU_ACTIVATIONS, self.memory // GPU_PART)
        return max(most // self.activation_bytes, 1) if self.activation_bytes else 1 << 62

    def chunk(self, batch: int, pixels: bool, pageable: bool = False) -> int:
        """Returns how many images are to move at a time: whole waves where several of them fit.

        ``pageable`` says whether the images are in memory that is not page-locked.
        """
        images, waves, parts, nbytes = WAVE, WAVES, CHUNKS_A_PASS, CHUNK_BYTES
        if pageable:
            images, waves = PAGEABLE_WAVE, PAGEABLE_WAVES
            parts, nbytes = PAGEABLE_CHUNKS_A_PASS, PAGEABLE_CHUNK_BYTES
        wave = images * self.multiprocessors
        most = min(nbytes // self._bytes(pixels), self._most_between_layers())
        if most < wave:
            return max(most, 1)
        return wave * max(min(most // wave, waves, batch // (parts * wave)), 1)

    def overlaps(self, batch: int, pixels: bool) -> bool:
        """Whether a pass over ``batch`` images in host memory goes in chunks."""
        if self.data_mode == "auto":
            return self.multiprocessors > 0 and batch >= 2 * self.chunk(batch, pixels)
        return self.data_mode == "stream"

    def batch(self, images: int, pixels: bool) -> int:
        """Returns how many of ``images`` in host memory a pass is to take."""
        if self.multiprocessors == 0:
            most = max(CPU_FUSED, CPU_FUSED_A_THREAD * self.threads)
            if self.activation_bytes:
                most = min(most, max(CPU_ACTIVATIONS // self.activation_bytes, CPU_LEAST))
                most = most if self.fused_layers else min(most, CPU_LAYERED)
        elif self.data_mode in ("transfer", "managed"):
            most = TO_SHOW
        elif self.overlaps(images, pixels):
            most = MOST_CHUNKS * self.chunk(images, pixels)
        else:
            most = min(max(GPU_BYTES // self._bytes(pixels), 1), self._most_between_layers())
        return max(min(images, most), 1)

    def batch_on_device(self, images: int) -> int:
        """Returns how many of ``images`` on the device a pass is to take: about the same in each."""
        passes = -(-images // self._most_between_layers())
        return -(-images // max(passes, 1)) or 1
