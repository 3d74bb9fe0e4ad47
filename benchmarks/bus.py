"""How fast the bus is: ``python -m benchmarks.bus [--json OUT]``.

Broker, server and client are three processes on one machine, as in use. Measures the time of one ask
after the other, and tells and published events per second with many in flight.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio

from offbook.bus import Broker, Bus, connect

BODY = {"type": "Heard", "text": "A stranger came to the village."}


async def run_broker(endpoint: str) -> None:
    async with Broker(endpoint):
        print("ready", flush=True)
        await anyio.sleep_forever()


async def run_server(endpoint: str) -> None:
    async with connect(endpoint, name="server") as bus:
        await bus.serve("echo/*")
        print("ready", flush=True)
        async for delivery in bus.deliveries():
            if delivery.expects_reply:
                await delivery.reply(delivery.body)
            else:
                await delivery.accept()


async def per_second(total: int, lanes: int, send: Callable[[], Awaitable[object]]) -> float:
    """Messages per second with ``lanes`` tasks that each send one after the other."""

    async def lane() -> None:
        for _ in range(total // lanes):
            await send()

    start = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for _ in range(lanes):
            tasks.start_soon(lane)
    return total / (time.perf_counter() - start)


async def events_per_second(bus: Bus, total: int) -> float:
    """Events per second from many publishers through the broker to one subscriber."""
    start = time.perf_counter()
    async with bus.subscribe("square") as events, anyio.create_task_group() as tasks:
        tasks.start_soon(per_second, total, 100, lambda: bus.publish("square", BODY))
        for _ in range(total):
            await events.__anext__()
    return total / (time.perf_counter() - start)


async def measure(endpoint: str) -> dict[str, float]:
    async with connect(endpoint, name="client") as bus:
        for _ in range(200):
            await bus.ask("echo/a", BODY)
        times = []
        for _ in range(2000):
            start = time.perf_counter()
            await bus.ask("echo/a", BODY)
            times.append(1000 * (time.perf_counter() - start))
        return {
            "ask_ms_median": round(statistics.median(times), 3),
            "ask_ms_p99": round(statistics.quantiles(times, n=100)[98], 3),
            "asks_per_s": round(await per_second(20_000, 200, lambda: bus.ask("echo/a", BODY))),
            "tells_per_s": round(await per_second(40_000, 200, lambda: bus.tell("echo/a", BODY))),
            "events_per_s": round(await events_per_second(bus, 20_000)),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--role", choices=("broker", "server"), help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        anyio.run(run_broker if arguments.role == "broker" else run_server, arguments.endpoint)
        return
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/bus.sock"
        others = []
        try:
            for role in ("broker", "server"):
                command = [sys.executable, "-m", "benchmarks.bus", "--role", role, "--endpoint", endpoint]
                others.append(subprocess.Popen(command, stdout=subprocess.PIPE))
                stdout = others[-1].stdout
                assert stdout is not None
                stdout.readline()
            summary = {**anyio.run(measure, endpoint), "load": round(os.getloadavg()[0], 1)}
        finally:
            for process in others:
                process.kill()
                process.wait()
    print(json.dumps(summary))
    if arguments.json:
        arguments.json.write_text(json.dumps({"summary": summary}, indent=2))


if __name__ == "__main__":
    main()
