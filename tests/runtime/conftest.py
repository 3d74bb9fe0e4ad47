"""Tiny models of every kind of architecture, and a ``Rig`` that steps one pool of KV memory by hand."""

from __future__ import annotations

import copy
import gc
import os
import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbook.runtime.models.blas import preload_blas

# Products of tiny matrices are done before a second BLAS thread has woken; idle ones only spin.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
preload_blas()

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402

mx.set_default_device(mx.Device(mx.cpu))

from mlx_lm.models import deepseek_v2, gemma3_text, lfm2, llama  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from offbook.runtime.engine.batch import Batch  # noqa: E402
from offbook.runtime.kv import native, native_read  # noqa: E402
from offbook.runtime.kv.arrays import PoolArrays  # noqa: E402
from offbook.runtime.kv.kernel import NativeAttention  # noqa: E402
from offbook.runtime.kv.memory import KVMemory, Loading, Plan  # noqa: E402
from offbook.runtime.kv.pool import BlockPool  # noqa: E402
from offbook.runtime.kv.probe import derive  # noqa: E402
from offbook.runtime.kv.scheme import KVScheme  # noqa: E402
from offbook.runtime.kv.spec import ModelCacheSpec  # noqa: E402
from offbook.runtime.kv.table import AgentTable  # noqa: E402
from offbook.runtime.models import decoder, linear  # noqa: E402
from offbook.runtime.models.deepseek_v2 import to_latent  # noqa: E402
from offbook.runtime.models.load import _evaluate_everything  # noqa: E402
from offbook.runtime.store import BlockStore, TensorSpec  # noqa: E402

# What the imports made stays; without this every full collection walks through it again.
gc.collect()
gc.freeze()

VOCABULARY = 128
"""Enough for the engine tests' tokenizer, whose ids are characters."""

CHUNK = 512


def _llama(**changes: Any) -> nn.Module:
    base: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "head_dim": 32,
    }
    return llama.Model(llama.ModelArgs(**(base | changes)))


def _gemma(window: int) -> nn.Module:
    return gemma3_text.Model(
        gemma3_text.ModelArgs(
            model_type="gemma3_text",
            hidden_size=64,
            num_hidden_layers=2,
            intermediate_size=128,
            num_attention_heads=4,
            head_dim=32,
            vocab_size=VOCABULARY,
            num_key_value_heads=1,
            sliding_window=window,
            sliding_window_pattern=2,
        )
    )


def _lfm2() -> nn.Module:
    return lfm2.Model(
        lfm2.ModelArgs(
            model_type="lfm2",
            vocab_size=VOCABULARY,
            hidden_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            norm_eps=1e-5,
            conv_bias=False,
            conv_L_cache=3,
            block_dim=64,
            block_ff_dim=128,
            block_multiple_of=16,
            block_ffn_dim_multiplier=1.0,
            block_auto_adjust_ff_dim=False,
            full_attn_idxs=[1],
            rope_theta=10000.0,
        )
    )


def _latent() -> nn.Module:
    tiny = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 64,
        "q_lora_rank": None,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 40,
        "v_head_dim": 24,
        "max_position_embeddings": 4096,
        "rope_scaling": {"factor": 1},
    }
    model = deepseek_v2.Model(deepseek_v2.ModelArgs.from_dict(tiny))
    for layer in model.layers[1:]:
        layer.mlp.gate.weight = mx.random.normal(layer.mlp.gate.weight.shape)
    return to_latent(model)


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "llama": _llama,
    "gemma-300": lambda: _gemma(300),
    "gemma-96": lambda: _gemma(96),
    "lfm2": _lfm2,
    "latent": _latent,
}

ARCHITECTURES = tuple(MAKERS)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def tiny() -> Callable[..., nn.Module]:
    """Tiny random models by architecture, each made once. Keywords change a Llama."""
    made: dict[str, nn.Module] = {}

    def get(name: str, **changes: Any) -> nn.Module:
        key = name + repr(sorted(changes.items()))
        if key not in made:
            mx.random.seed(11)
            model = _llama(**changes) if changes else MAKERS[name]()
            # Some arrays are no parameters (rotary frequencies); any thread may be the next to use them.
            _evaluate_everything(model)
            made[key] = model
        return made[key]

    return get


@pytest.fixture(params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(architecture: str, tiny: Callable[..., nn.Module]) -> nn.Module:
    return tiny(architecture)


def random_ids(count: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.random.default_rng(seed).integers(1, VOCABULARY - 8, count, dtype=np.uint32)


@pytest.fixture(scope="session")
def ids() -> Callable[..., np.ndarray[Any, np.dtype[np.uint32]]]:
    """``ids(count, seed)``: random token ids."""
    return random_ids


def _rounding(cache: Any) -> Any:
    """One of mlx-lm's caches, keeping what it is given rounded to bfloat16 as ours do."""
    store = cache.update_and_fetch

    def update_and_fetch(*pair: mx.array) -> Any:
        return store(*(x.astype(mx.bfloat16).astype(x.dtype) for x in pair))

    cache.update_and_fetch = update_and_fetch
    return cache


class Oracle:
    """mlx-lm's own caches over one sequence, as wide as 16 bits are."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.cache = [
            _rounding(cache) if hasattr(cache, "update_and_fetch") else cache
            for cache in make_prompt_cache(model)
        ]

    def feed(self, ids: Sequence[int]) -> np.ndarray[Any, Any]:
        """Logits of the last position."""
        return np.array(self.model(mx.array(np.asarray(ids))[None], cache=self.cache)[0, -1])


@pytest.fixture(scope="session")
def oracle() -> type[Oracle]:
    return Oracle


@dataclass
class Rig:
    """A pool over a tiny model and everything between it and the disk, stepped by hand."""

    model: nn.Module
    scheme: KVScheme = field(default_factory=KVScheme)
    slots: int = 24
    pages: int = 24
    host: bool = True
    native: bool = False
    whole: bool = True
    """With ``native``: few tokens' whole forward is the kernel's, not attention alone, as in the engine."""
    folder: Path | None = None
    fingerprint: str = "f" * 64

    def __post_init__(self) -> None:
        self.spec: ModelCacheSpec = derive(self.model)
        self.pool = BlockPool([(group.name, self.slots) for group in self.spec.groups], self.pages)
        sizes = [self.slots] * len(self.spec.groups)
        self.arrays = PoolArrays(self.spec, self.scheme, sizes, self.pages, host=self.host)
        front = NativeAttention(self.arrays) if self.native else None
        # As the engine has it: few tokens go through the kernel as a whole, where the model is one for it. A
        # copy, since ``model`` is what results are compared with.
        served, forward = self.model, None
        if front is not None and self.whole:
            served = copy.deepcopy(self.model)
            linear.install(served)
            forward = decoder.find(served, self.spec)
        self.batch = Batch(served, self.arrays, self.pool, native=front, decoder=forward)
        self.store = self.open_store()
        self._done: queue.SimpleQueue[Loading] = queue.SimpleQueue()
        self.memory = KVMemory(
            self.spec, self.scheme, self.fingerprint, self.arrays, self.pool, self.store, self._done.put
        )

    def open_store(self) -> BlockStore | None:
        if self.folder is None:
            return None
        layout = [
            TensorSpec(tensor.name, tensor.dtype, tensor.shape)
            for group in self.spec.groups
            for tensor in group.tensors(self.scheme)
        ]
        return BlockStore(
            self.folder,
            fingerprint=self.fingerprint,
            layout=layout,
            lock_seconds=1.0,
            reader=native_read.reader() if self.native else None,
        )

    def close(self) -> None:
        if self.store is not None:
            self.store.close()

    # ---- what an engine does

    def bring(self, agent: str, ids: Any, *, salt: str = "", origin: str = "") -> tuple[AgentTable, Plan]:
        """The agent's table with what there is of ``ids``, and the plan that brought it."""
        for _ in range(5):
            plan = self.memory.plan((agent, salt), ids, origin)
            started = self.memory.start((agent, salt), plan)
            if isinstance(started, Loading):
                loading = self._done.get(timeout=30)
                assert loading is started
                table = self.memory.finish(loading, ids)
                if table is None:
                    continue
                return table, plan
            return started, plan
        raise AssertionError("the same plan fails again and again")

    def say(
        self, agent: str, ids: Any, *, salt: str = "", origin: str = "", chunk: int = CHUNK
    ) -> tuple[np.ndarray[Any, Any], Plan]:
        """Prefill what is missing of ``ids``: the last token's logits, and the plan."""
        table, plan = self.bring(agent, ids, salt=salt, origin=origin)
        table.ids = np.concatenate([table.ids[: table.tokens], ids[table.tokens :]])
        logits = None
        while table.tokens < len(ids):
            logits = self.batch.prefill([table], [ids[table.tokens : table.tokens + chunk]], logits=True)
            self.memory.after_step(table)
        assert logits is not None
        return np.array(logits[0]), plan

    def decode(self, agents: Sequence[str], tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        """One decode step: logits [rows, vocabulary]."""
        tables = [self.table(agent) for agent in agents]
        for table, token in zip(tables, tokens, strict=True):
            table.ids = np.append(table.ids[: table.tokens], np.uint32(token))
        logits = self.batch.decode(tables, tokens)
        for table in tables:
            self.memory.after_step(table)
        return np.array(logits)

    def prefill(self, agents: Sequence[str], chunks: Sequence[Any]) -> np.ndarray[Any, Any]:
        """One prefill of some rows, made if they are new: logits [rows, vocabulary]."""
        tables = [self.table(agent) for agent in agents]
        for table, chunk in zip(tables, chunks, strict=True):
            table.ids = np.concatenate([table.ids[: table.tokens], chunk])
        logits = self.batch.prefill(tables, chunks, logits=True)
        for table in tables:
            self.memory.after_step(table)
        return np.array(logits)

    def table(self, agent: str, salt: str = "") -> AgentTable:
        key = (agent, salt)
        if key not in self.memory.tables:
            self.memory.tables[key] = AgentTable(agent, salt, self.spec.groups, self.scheme)
        return self.memory.tables[key]

    def evict(self, *agents: str, salt: str = "") -> None:
        """Evict agents and forget what the pool still holds of them, once all is on disk."""
        for agent in agents:
            self.memory.evict((agent, salt))
        if self.store is not None:
            assert self.store.flush(30)
        for group in self.pool.groups:
            group.forget_content()

    def lose(self, agent: str, salt: str = "") -> None:
        """Drop the agent unsaved, and what the pool still holds of it."""
        self.memory.drop((agent, salt))
        for group in self.pool.groups:
            group.forget_content()

    @property
    def used(self) -> tuple[int, ...]:
        """Slots of each group and pages in use."""
        return (*(group.used for group in self.pool.groups), self.pool.pages.used)


@pytest.fixture
def rig(tiny: Callable[..., nn.Module]) -> Iterator[Callable[..., Rig]]:
    """Makes rigs: ``rig("llama", bits=4, native=True, folder=tmp_path)``; closed, and checked, at the end."""
    rigs: list[Rig] = []

    def make(
        model: str | nn.Module, *, bits: Any = "default", scheme: KVScheme | None = None, **options: Any
    ) -> Rig:
        if scheme is None:
            scheme = KVScheme() if bits == "default" else KVScheme.uniform(bits)
        made = Rig(tiny(model) if isinstance(model, str) else model, scheme, **options)
        rigs.append(made)
        return made

    yield make
    for made in rigs:
        made.close()
        made.pool.check()


@pytest.fixture(params=["portable", "native"])
def native_kernel(request: pytest.FixtureRequest) -> bool:
    """Both ways to attend on the CPU."""
    if request.param == "native" and not native.available():
        pytest.skip(str(native.unavailable_reason()))
    return bool(request.param == "native")
