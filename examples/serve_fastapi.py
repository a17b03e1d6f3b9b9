"""Serves a network over HTTP. Needs fastapi and uvicorn:

    uvicorn --app-dir examples serve_fastapi:app --workers 1

One process answers requests in several threads, and every call of the engine has memory of its own. With more
workers, give each its share of the CPUs: THREADS below is cores by WORKERS. A request is the bytes of an .npy
file:

    curl --data-binary @images.npy http://localhost:8000/predict
"""

from __future__ import annotations

import io
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from fastapi import FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool

import cnn_engine
from cnn_engine.devices import threads

WORKERS = int(os.environ.get("WEB_CONCURRENCY", "1"))
THREADS = max(1, threads.default() // WORKERS)  # a container's quota counts
MOST_BYTES = 2**26


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Makes the engine before the first request, and warms it up."""
    with cnn_engine.Engine("cifar10", device="cpu", threads=THREADS) as engine:
        engine.predict(np.zeros((1, 3, 32, 32), np.uint8))
        app.state.engine = engine
        yield


app = FastAPI(title="cnn_engine", lifespan=lifespan)


@app.get("/health")
async def health() -> dict[str, str]:
    """Says that the engine is ready."""
    return {"status": "ready"}


@app.post("/predict")
async def predict(request: Request) -> dict[str, Any]:
    """Returns class and probabilities of uint8 images [N, 3, 32, 32]."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise HTTPException(413, f"expected at most {MOST_BYTES} bytes")
    try:
        images = np.load(io.BytesIO(body), allow_pickle=False)
        # A call computes for milliseconds: in a thread, so that other requests are answered meanwhile.
        probabilities = await run_in_threadpool(request.app.state.engine.predict, images)
    except (cnn_engine.InputError, ValueError, OSError, EOFError) as error:
        raise HTTPException(400, str(error)) from error
    return {
        "classes": probabilities.argmax(axis=1).tolist(),
        "probabilities": probabilities.tolist(),
    }
