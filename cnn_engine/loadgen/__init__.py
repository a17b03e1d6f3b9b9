"""``cnn-engine loadgen``: networks under MLPerf's load generator, which issues queries and keeps the times.

- ``command``: the command line.
- ``rules``: what MLPerf Inference asks of each scenario.
- ``contestants``: the engine, and other libraries on the same file.
- ``harness``: the system under test: what answers LoadGen's queries.
- ``logs``: what LoadGen's logs say.
"""

from .command import main

__all__ = ["main"]
