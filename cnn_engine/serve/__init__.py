"""``cnn-engine serve``: networks over HTTP and gRPC, by the Open Inference Protocol (KServe v2).

Clients of Triton and KServe speak it. Requests that wait are put together into batches.

- ``command``: the command line.
- ``repository``: the models of a folder, loaded, replaced and unloaded while the server runs.
- ``model``: one network that is served: its tensors checked, its requests batched, its statistics.
- ``replicas``, ``ray_replicas``: the engines that run its passes, here or on a cluster.
- ``batching``: the queue of a model and the threads that empty it.
- ``protocol``: requests and responses, apart from how they travel.
- ``http``, ``rpc``: how they travel.
- ``server``: both of them on one event loop.
- ``shared_memory``: tensors that stay on the machine.
- ``metrics``: what Prometheus reads.
"""

from .command import main

__all__ = ["main"]
