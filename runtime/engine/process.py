"""The engine process: ``python -m offbook.runtime.engine.process --config JSON``.

Owns start and end of one engine: BLAS before MLX, model and store on the step thread, serving on the
bus, and ending in order when the host goes away (dirty memory is flushed first).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import anyio

from offbook.bus import connect
from offbook.bus.errors import ContextTooLarge, ModelError, OffbookError, UnknownModel, to_wire

from ..config import LEAVE_FREE_BYTES, EngineConfig, InvalidConfig, default_budget_bytes
from ..models.blas import preload_blas

EX_CONFIG = 78
"""Exit code for what a restart would not mend (``sysexits.h``)."""

BROKER_GRACE_SECONDS = 5.0
"""How long the broker may be away before the engine flushes and ends."""

STUCK_SECONDS = 300.0
"""A single step that takes longer is taken to be stuck: the process ends and the host starts another."""

IO_BYTES = 64 << 20
"""Bytes on their way to disk at most; what comes on top is written later."""

log = logging.getLogger("offbook.engine")


def main() -> None:
    parser = argparse.ArgumentParser(description="One offbook engine; started by the host.")
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    arguments = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    code = 0
    try:
        config = EngineConfig.from_json(arguments.config)
        anyio.run(serve, config)
    except BaseException as error:
        code = report(error)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # All that matters is on disk. Interpreter shutdown would only tear down MLX's threads.
    os._exit(code)


def report(error: BaseException) -> int:
    """Tell the host why the engine ends; the exit code says whether a restart may help."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return 0
    log.error("the engine ends: %s", error, exc_info=error)
    path = os.environ.get("OFFBOOK_ENGINE_ERROR")
    if path:
        Path(path).write_text(json.dumps(to_wire(error)))
    final = isinstance(error, UnknownModel | ModelError | ContextTooLarge | InvalidConfig)
    return EX_CONFIG if final else 1


async def serve(config: EngineConfig) -> None:
    """Serve until the host asks for the end or goes away."""
    blas = preload_blas()
    log.info("BLAS: %s", blas)
    from .actor import EngineActor

    loop = build_loop(config)
    loop.start()
    async with connect(config.endpoint, name="engine", timeout=30.0) as bus:
        await anyio.to_thread.run_sync(loop.ready.result)
        threading.Thread(target=watch, args=(loop,), daemon=True).start()
        actor = EngineActor(bus, loop)
        async with anyio.create_task_group() as tasks:

            async def until(wait: Any) -> None:
                await wait()
                tasks.cancel_scope.cancel()

            async def broker_gone() -> None:
                await bus.wait_lost(BROKER_GRACE_SECONDS)
                log.warning("the broker has been away for %.0f s", BROKER_GRACE_SECONDS)

            async def asked_to_end() -> None:
                with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                    async for _ in signals:
                        return

            async def shut_down() -> None:
                await actor.ended.wait()
                await anyio.sleep(0.05)  # lets the reply leave

            tasks.start_soon(until, broker_gone)
            tasks.start_soon(until, asked_to_end)
            tasks.start_soon(until, parent_gone)
            tasks.start_soon(until, shut_down)
            await tasks.start(actor.run)
            note_ready()
            log.info("serving %s as process %d", config.model, os.getpid())
        if not actor.ended.is_set():
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(loop.stop().result)
    log.info("the engine has ended; everything is on disk")


def note_ready() -> None:
    """Tell the host that this engine serves, and since when: its life is counted from here."""
    path = os.environ.get("OFFBOOK_ENGINE_READY")
    if path:
        Path(path).write_text(f"{time.monotonic()}\n")  # a clock of the machine, not of the process


async def parent_gone() -> None:
    """Return once the host that started this process is no longer its parent."""
    parent = os.environ.get("OFFBOOK_PARENT_PID")
    if parent is None:
        await anyio.sleep_forever()
    # Often enough that this engine is gone before the next host of the same name can take it for its own.
    while os.getppid() == int(parent or 0):  # noqa: ASYNC110 (the kernel has no event for it here)
        await anyio.sleep(0.05)
    log.warning("the host (process %s) is gone", parent)


def build_loop(config: EngineConfig) -> Any:
    """The step thread's loop for this configuration."""
    import mlx.core as mx

    from ..kv import native_read
    from ..kv.kernel import NativeAttention, supported
    from ..kv.profile import scheme_for
    from ..kv.scheme import KVScheme
    from ..models.load import load
    from ..store.layout import TensorSpec
    from ..store.store import BlockStore
    from .loop import EngineLoop

    on_cpu = mx.default_device() == mx.Device(mx.cpu) or not _has_gpu(mx)
    if on_cpu:
        mx.set_default_device(mx.Device(mx.cpu))

    def open_store(fingerprint: str, spec: Any, scheme: Any) -> Any:
        if not config.store_dir:
            return None
        layout = [
            TensorSpec(tensor.name, tensor.dtype, tensor.shape)
            for group in spec.groups
            for tensor in group.tensors(scheme)
        ]
        return BlockStore(
            config.store_dir,
            fingerprint=fingerprint,
            layout=layout,
            cap_bytes=config.disk_cap_bytes,
            min_free=LEAVE_FREE_BYTES,
            pending_bytes=IO_BYTES,
            reader=native_read.reader(),
        )

    return EngineLoop(
        lambda: load(config.model, compact=True),
        open_store,
        # 4 bits is the default, which a calibrated model refines.
        scheme=scheme_for if config.kv_bits == 4 else KVScheme.uniform(config.kv_bits),  # type: ignore[arg-type]
        budget_bytes=config.budget_bytes or default_budget_bytes(working_set_bytes=working_set(mx)),
        generous=config.budget_bytes is None,
        host=on_cpu,
        trace=Path(config.trace) if config.trace else None,
        native=lambda arrays: NativeAttention(arrays) if supported(arrays) else None,
    )


def working_set(mx: Any) -> int | None:
    """The memory that Metal recommends to use at most, or None elsewhere."""
    try:
        info = mx.device_info() if hasattr(mx, "device_info") else mx.metal.device_info()
        return int(info["max_recommended_working_set_size"])
    except (AttributeError, KeyError, RuntimeError, ValueError):
        return None


def _has_gpu(mx: Any) -> bool:
    try:
        return bool(mx.is_available(mx.gpu))
    except (AttributeError, ValueError):
        return bool(mx.metal.is_available())


def watch(loop: Any) -> None:
    """End the process if a step never ends or the step thread died, so that the host starts another."""
    while True:
        time.sleep(1.0)
        if loop.died:
            log.error("the step thread has ended; the engine ends")
            os._exit(70)
        started = loop.step_started
        if started and time.monotonic() - started > STUCK_SECONDS:
            log.error("a step has not ended for %.0f s; the engine ends", STUCK_SECONDS)
            import faulthandler

            faulthandler.dump_traceback(all_threads=True)
            os._exit(70)


if __name__ == "__main__":
    try:
        main()
    except OffbookError as error:
        sys.exit(str(error))
