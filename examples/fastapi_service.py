"""FastAPI on a durable queue: the lifespan opens it, requests put, and a task in the background works.

    python fastapi_service.py         # runs the service in this process, sends some requests, and prints
    uvicorn fastapi_service:app       # the service alone; one process: --workers 3 needs gunicorn_service.py's inbox

``POST /orders`` answers when the order is on disk. The worker handles orders one after the other, into handled.txt.
It needs fastapi and httpx. It prints:

    202 {'id': ...}
    202 {'id': ...}
    422 an order without an article
    handled: ['apples', 'pears']

Stop the service, or kill it: the orders that it has accepted and not handled are handled after the next start. One that
was handled in the last second before a kill may be handled twice.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from pydantic import BaseModel

from kestrelpy import JournaledQueue
from kestrelpy.codecs import pydantic

handled: list[str] = []


class Order(BaseModel):
    article: str
    count: int = 1


async def work(queue: JournaledQueue[Order]) -> None:
    """Handle orders until the task is cancelled. An order that it has in hand then is given back."""
    while True:
        with await queue.aget() as item:
            await asyncio.sleep(0.01)
            handled.append(item.value.article)
            with open("handled.txt", "a") as file:
                print(item.id, item.value.article, file=file)


@contextlib.asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    with JournaledQueue("fastapi-data", "orders", codec=pydantic(Order)) as queue:
        app.state.queue = queue
        worker = asyncio.create_task(work(queue))
        yield
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)


app = FastAPI(lifespan=lifespan)


@app.post("/orders", status_code=202)
async def post_order(order: Order, request: Request) -> dict[str, int]:
    """``aput`` waits for the disk, and many requests share one sync. ``queue.put`` would not wait for it."""
    return {"id": await request.app.state.queue.aput(order)}


@app.get("/health")
async def health(request: Request) -> dict[str, int]:
    return {"left": request.app.state.queue.stats().items}


def main() -> None:
    with TestClient(app) as client:
        for article in ("apples", "pears"):
            answer = client.post("/orders", json={"article": article})
            print(answer.status_code, answer.json())
        print(client.post("/orders", json={"count": 3}).status_code, "an order without an article")
        while client.get("/health").json() != {"left": 0}:
            time.sleep(0.01)
        print("handled:", handled)


if __name__ == "__main__":
    main()
