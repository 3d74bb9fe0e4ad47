"""Running the model: prefill chunks and batched decode steps over agents' tables.

Owns the forward passes and nothing of the policy. The logits of the last position only are computed:
a chunk's hidden states go to the head one position a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..kv.arrays import PoolArrays
from ..kv.cache import BatchQuantizedKVCache, Step
from ..kv.pool import BlockPool
from ..kv.probe import make_caches
from ..kv.table import AgentTable, Ids
from ..models.decoder import Decoder

Head = Callable[[mx.array], mx.array]


def split_head(model: nn.Module) -> tuple[Callable[..., mx.array], Head] | None:
    """The model as (body, head), or None if it is not built that way.

    Checked by comparing with the whole model on a few tokens, so a model whose head does more (scales,
    caps) is found out and run whole.
    """
    body = getattr(model, "model", None)
    embed = getattr(body, "embed_tokens", None)
    heads: list[Head] = []
    if callable(getattr(model, "lm_head", None)):
        heads.append(model.lm_head)
    if embed is not None and hasattr(embed, "as_linear"):
        heads.append(embed.as_linear)
    if body is None or not heads:
        return None
    tokens = mx.array([[1, 2, 3, 4]])
    expected = model(tokens, cache=list(make_caches(model)))
    for head in heads:
        try:
            hidden = body(tokens, cache=list(make_caches(model)))
            got = head(hidden)
        except (TypeError, ValueError, AttributeError):
            continue
        if got.shape == expected.shape and mx.allclose(got, expected, rtol=1e-4, atol=1e-4).item():
            return body, head
    return None


class Batch:
    """Forward passes of one model over one pool.

    Args:
        native: the compiled kernel's front for this pool (``kernel.NativeAttention``).
        decoder: the kernel's forward of this model, for few tokens; used with ``native`` only.
    """

    def __init__(
        self,
        model: nn.Module,
        arrays: PoolArrays,
        pool: BlockPool,
        *,
        native: Any = None,
        decoder: Decoder | None = None,
    ) -> None:
        self.model, self.arrays, self.pool, self.native = model, arrays, pool, native
        self.split = split_head(model)
        self.decoder = decoder if native is not None else None

    def prefill(
        self,
        tables: Sequence[AgentTable],
        chunks: Sequence[Ids],
        *,
        logits: bool,
        unless: Callable[[], bool] | None = None,
    ) -> mx.array | None:
        """Run one chunk of each row. With ``logits``, those of each row's last token: [rows, vocabulary].

        Args:
            unless: asked now and then where the forward is the kernel's. When it is true, the tables are left
                as they were and ``Interrupted`` is raised.
        """
        counts = [len(chunk) for chunk in chunks]
        step = self._step(tables, counts)
        out: mx.array | None
        if (decoder := self._decoder(sum(counts))) is not None:
            out = decoder.forward([(step, chunks)], logits=len(chunks) if logits else 0, unless=unless)
        else:
            tokens = np.zeros((len(chunks), max(counts)), np.uint32)
            for row, chunk in enumerate(chunks):
                tokens[row, : len(chunk)] = chunk
            out = self._forward(mx.array(tokens), step, counts if logits else None)
            pending = [c.pending if isinstance(c, BatchQuantizedKVCache) else c.cache for c in step.caches]
            mx.eval(pending if out is None else (out, pending))
        step.commit()
        return out if logits else None

    def decode(self, tables: Sequence[AgentTable], tokens: Sequence[int]) -> mx.array:
        """Run one token of each row: logits [rows, vocabulary]."""
        step = self._step(tables, [1] * len(tables), decoding=True)
        column = np.array(tokens, np.uint32)[:, None]
        out: mx.array | None
        if (decoder := self._decoder(0)) is not None:  # however many: a row has the bits that it has alone
            out = decoder.forward([(step, column)], logits=len(tables))
        else:
            out = self._forward(mx.array(column), step, [1] * len(tables))
        assert out is not None
        mx.eval(out)
        step.commit()
        return out

    def room(self, rows: int) -> int | None:
        """Tokens that may be prefilled in the forward of a decode step of so many rows; None: never any.

        What is more is another path's, whose results differ in the last bits: a lot of short prompts must not
        get there for being many.
        """
        return None if self._decoder(0) is None or self.decoder is None else max(0, self.decoder.limit - rows)

    def both(
        self,
        tables: Sequence[AgentTable],
        tokens: Sequence[int],
        joining: Sequence[AgentTable],
        chunks: Sequence[Ids],
        *,
        logits: bool,
    ) -> tuple[mx.array, mx.array | None]:
        """``decode`` of some rows and ``prefill`` of others in one forward: the same results.

        Weights are read once, so what is read beside a decode step costs little more than its products.

        There must be ``room`` for the chunks.
        """
        decoder = self._decoder(sum(map(len, chunks)))
        assert decoder is not None
        decode = self._step(tables, [1] * len(tables), decoding=True)
        prefill = self._step(joining, [len(chunk) for chunk in chunks])
        column = np.array(tokens, np.uint32)[:, None]
        wanted = len(tables) + (len(chunks) if logits else 0)
        out = decoder.forward([(decode, column), (prefill, chunks)], logits=wanted)
        mx.eval(out)
        decode.commit()
        prefill.commit()
        return out[: len(tables)], out[len(tables) :] if logits else None

    def _step(self, tables: Sequence[AgentTable], counts: Sequence[int], *, decoding: bool = False) -> Step:
        return Step(self.arrays, self.pool, tables, counts, decoding=decoding, native=self.native)

    def _decoder(self, tokens: int) -> Decoder | None:
        """The kernel's forward, if reading so many tokens is for it."""
        decoder = self.decoder
        return decoder if decoder is not None and tokens <= decoder.limit and decoder.current() else None

    def _forward(self, tokens: mx.array, step: Step, counts: Sequence[int] | None) -> mx.array | None:
        """Last-token logits, or None when ``counts`` is None (the caches are then all that matters)."""
        if self.split is None:
            logits = self.model(tokens, cache=step.caches)
            return None if counts is None else last(logits, counts)
        body, head = self.split
        hidden = body(tokens, cache=step.caches)
        return None if counts is None else head(last(hidden, counts)[:, None])[:, 0]


def last(x: mx.array, counts: Sequence[int]) -> mx.array:
    """The last real position of each row: [rows, length, n] to [rows, n]."""
    return x[mx.arange(len(counts)), mx.array([count - 1 for count in counts])]
