"""DeepSeek-V2 attention in the latent form: what the cache keeps is what the model compressed.

mlx-lm's ``deepseek_v2`` expands each token's latent into the keys and values of all heads and caches
those: for DeepSeek-V2-Lite 16 x (192 + 128) numbers a token and layer. The expansion is linear, so it
can move to the other side of both products (DeepSeek-V2, arXiv 2405.04434, section 2.1.2)::

    q_nope . (W_uk c) = (q_nope W_uk) . c        sum_t p_t (W_uv c_t) = W_uv (sum_t p_t c_t)

Then all heads attend to one row a token, ``[c ; k_pe]`` (512 + 64 numbers for Lite), whose first channels
are also the values. ``to_latent`` turns a loaded model into this form; mlx-lm does the same for V3.

Per layer and step the attention calls, with r = kv_lora_rank and d = qk_rope_head_dim::

    rows, _ = cache.update_and_fetch(row [B, 1, L, r + d], empty [B, 1, L, 0])
    scaled_dot_product_attention(queries [B, heads, L, r + d], rows, rows[..., :r], cache=, scale=, mask=)

by this module's global name, so that ``kv.attention.install`` can rebind it.
"""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import deepseek_v2
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear

from offbook.bus.errors import ModelError


class LatentCache(KVCache):  # type: ignore[misc]  # mlx-lm has no annotations
    """mlx-lm's cache for one latent layer: rows in ``keys`` [B, 1, tokens, r + d], ``values`` of no width.

    The class is how a layer says that its values are the first channels of its keys.
    """

    latent = True


class LatentAttention(nn.Module):  # type: ignore[misc]
    """Multi-head latent attention on cached latents, with the weights of a ``DeepseekV2Attention``.

    Attributes:
        up_keys: W_uk, weight [heads, qk_nope_head_dim, r], applied to queries.
        up_values: W_uv, weight [heads, v_head_dim, r], applied to outputs.
        scale: of the scores, with YaRN's correction (``mscale_all_dim``) as mlx-lm computes it.
    """

    def __init__(self, source: deepseek_v2.DeepseekV2Attention) -> None:
        super().__init__()
        self.num_heads = source.num_heads
        self.kv_lora_rank = source.kv_lora_rank
        self.q_lora_rank = source.q_lora_rank
        self.qk_nope_head_dim = source.qk_nope_head_dim
        self.qk_rope_head_dim = source.qk_rope_head_dim
        self.v_head_dim = source.v_head_dim
        self.scale = source.scale
        for name in ("q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj"):
            if name in source:
                self[name] = source[name]
        self.kv_a_proj_with_mqa = source.kv_a_proj_with_mqa
        self.kv_a_layernorm = source.kv_a_layernorm
        self.o_proj = source.o_proj
        self.rope = source.rope
        self.up_keys, self.up_values = split_up_projection(
            source.kv_b_proj, self.num_heads, self.qk_nope_head_dim, self.v_head_dim
        )

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """Attention of x [B, L, hidden] over the cached tokens and itself: [B, L, hidden]."""
        B, L, _ = x.shape
        rank = self.kv_lora_rank
        if self.q_lora_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.reshape(B, L, self.num_heads, -1).transpose(0, 2, 1, 3)
        q_nope, q_pe = mx.split(q, [self.qk_nope_head_dim], axis=-1)
        latent, k_pe = mx.split(self.kv_a_proj_with_mqa(x)[:, None], [rank], axis=-1)

        offset = 0 if cache is None else cache.offset  # an int, or an array [B] when the rows differ
        queries = mx.concatenate(
            [_per_head(self.up_keys, q_nope, transpose=False), self.rope(q_pe, offset)], axis=-1
        )
        rows = mx.concatenate([self.kv_a_layernorm(latent), self.rope(k_pe, offset)], axis=-1)
        if cache is not None:
            rows, _ = cache.update_and_fetch(rows, rows[..., :0])
        output = scaled_dot_product_attention(
            queries, rows, rows[..., :rank], cache=cache, scale=self.scale, mask=mask
        )
        output = _per_head(self.up_values, output, transpose=True)
        return cast(mx.array, self.o_proj(output.transpose(0, 2, 1, 3).reshape(B, L, -1)))


class LatentModel(deepseek_v2.Model):  # type: ignore[misc]
    """A DeepSeek-V2 model whose layers cache latents. Made by ``to_latent``, never constructed."""

    def make_cache(self) -> list[LatentCache]:
        return [LatentCache() for _ in self.layers]


def to_latent(model: nn.Module) -> LatentModel:
    """Convert a loaded mlx-lm DeepSeek-V2 model in place and return it. Idempotent.

    The logits stay the same up to the order of the sums. Quantised weights stay packed as they are: both
    up projections are row ranges of ``kv_b_proj``, which is quantised along its rows.

    Raises:
        ModelError: the model is not mlx-lm's ``deepseek_v2``.
    """
    if isinstance(model, LatentModel):
        return model
    if type(model) is not deepseek_v2.Model:
        raise ModelError(
            f"the latent form is for mlx-lm's deepseek_v2 models, not for {type(model).__module__}; "
            "serve this one as it is"
        )
    for layer in model.layers:
        layer.self_attn = LatentAttention(layer.self_attn)
        mx.eval(layer.self_attn.parameters())  # one layer at a time: the whole projection can go at once
    model.__class__ = LatentModel
    return cast(LatentModel, model)


def split_up_projection(
    projection: nn.Module, heads: int, key_width: int, value_width: int
) -> tuple[nn.Module, nn.Module]:
    """``kv_b_proj`` [heads * (key_width + value_width), r] as W_uk and W_uv, one matrix a head each.

    A quantised projection gives quantised parts with the very same numbers.
    """
    parts: tuple[nn.Module, nn.Module] = (
        _matrices(projection, heads, key_width),
        _matrices(projection, heads, value_width),
    )
    for name in ("weight", "scales", "biases"):
        whole = projection.get(name)
        if whole is not None:
            per_head = whole.reshape(heads, key_width + value_width, -1)
            for part, piece in zip(parts, mx.split(per_head, [key_width], axis=1), strict=True):
                part[name] = mx.contiguous(piece)
    return parts


def _matrices(projection: nn.Module, heads: int, width: int) -> nn.Module:
    """A module to hold ``heads`` matrices of ``width`` rows; its weights are yet to be set."""
    if isinstance(projection, nn.QuantizedLinear):
        group = projection.group_size
        return QuantizedMultiLinear(group, width, heads, group, projection.bits, projection.mode)
    return MultiLinear(1, width, heads)


def _per_head(matrices: nn.Module, x: mx.array, *, transpose: bool) -> mx.array:
    """Multiply x [B, heads, L, n] by each head's matrix, all rows and tokens in one product a head.

    Left as it is, the product would run once per row and head, with one-token operands in decode steps.
    """
    B, heads, L, width = x.shape
    flat = x.swapaxes(0, 1).reshape(heads, B * L, width)
    return cast(mx.array, matrices(flat, transpose=transpose).reshape(heads, B, L, -1).swapaxes(0, 1))
