"""Every public call of tritonclient's clients is answered rightly or refused, as the documentation says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

for module in ("http", "grpc", "http.aio", "grpc.aio"):
    pytest.importorskip(f"tritonclient.{module}", exc_type=(ImportError, RuntimeError))
pytest.importorskip("uvicorn")

from benchmarks import serve_clients  # noqa: E402
from cnn_engine.measure import environment  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "tritonclient.md"


def test_every_call_is_as_the_page_says():
    clients = serve_clients.try_all()
    for kind, found in clients.items():
        assert not serve_clients.wrong(found["outcomes"]), kind
    page = PAGE.read_text()
    for line in serve_clients.table(clients)[2 : 2 + len(serve_clients.TRIES)]:
        assert line in page.splitlines()
    if f" tritonclient {environment.package_version('tritonclient')} " in page:
        assert not any(found["not_tried"] for found in clients.values())


def test_an_answer_that_is_not_right_is_wrong():
    async def answer(right):
        return right

    def fails(_):
        raise ValueError("no")

    tried = [
        asyncio.run(serve_clients._outcome(one, None))
        for one in (lambda _: answer(True), lambda _: answer(False), lambda _: answer([]), fails)
    ]
    assert tried == ["passed", "wrong: False", "wrong: []", "wrong: ValueError: no"]
    assert serve_clients.wrong(dict(zip("abcd", tried, strict=True))) == ["b", "c", "d"]
