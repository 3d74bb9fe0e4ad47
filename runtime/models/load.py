"""From a model reference to a model in memory, ready for any thread.

Owns the state a model is in after loading (``resolve`` owns where it comes from). On the CPU device
quantised layers are dequantised and all weights become float32: MLX's 4-bit and 16-bit matrix products
are 10 to 50 times slower there.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from offbook.bus.errors import ModelError
from offbook.runtime.models.blas import preload_blas
from offbook.runtime.models.cache import Progress, no_progress
from offbook.runtime.models.fingerprint import combine, fingerprint
from offbook.runtime.models.resolve import resolve

if TYPE_CHECKING:
    import mlx.core as mx

# At import: whoever imports this is about to import MLX, and after that it is too late (25 times slower).
preload_blas()

PLAIN_TEMPLATE = (
    "{% if bos_token and add_bos %}{{ bos_token }}{% endif %}"
    "{% for message in messages %}"
    "{{ message['role'] | capitalize }}: {{ message['content'] }}\n\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""What a base model without a chat template is given, so that every model can hold a conversation."""


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory. Every array is evaluated, so any thread may compute with it.

    Attributes:
        model: the mlx-lm model (``nn.Module``).
        tokenizer: mlx-lm's ``TokenizerWrapper``; its chat template is always usable.
        config: the effective ``config.json``.
        path: the folder it was loaded from.
        fingerprint: of model, tokenizer, template and dtype (see ``fingerprint_for`` for KV).
        ref: the reference it was asked for by.
        context_limit: tokens the model was made for.
        eos_token_ids: ids that end a generation.
        has_chat_template: False if the model came without one and ``PLAIN_TEMPLATE`` stands in.
        dtype: what is computed with, such as ``float32``.
        weights_bytes: bytes of all parameters in memory, as they are kept.
    """

    model: Any
    tokenizer: Any
    config: dict[str, Any]
    path: Path
    fingerprint: str
    ref: str
    context_limit: int
    eos_token_ids: frozenset[int]
    has_chat_template: bool
    dtype: str
    weights_bytes: int

    def fingerprint_for(self, kv_scheme: str) -> str:
        """The fingerprint of KV blocks of this model stored by ``kv_scheme``."""
        return combine(self.fingerprint, kv_scheme)


def load(
    ref: str,
    *,
    progress: Progress | None = None,
    device: Literal["cpu", "gpu"] | None = None,
    latent: bool = True,
    compact: bool = False,
) -> LoadedModel:
    """Load the model ``ref`` names.

    Args:
        progress: called as ``progress(stage, done, total)`` during long work.
        device: where it will run; MLX's default device when None.
        latent: give DeepSeek-V2 the form that caches latents; False keeps mlx-lm's own.
        compact: on the CPU, have the native kernel compute few rows, and keep weights in the few bits they
            have where that loses nothing (``linear.install``). One matrix at a time, so that the floats are
            never in memory together.

    Raises:
        UnknownModel: ``ref`` names nothing.
        ModelError: it cannot be fetched, verified, converted or loaded; the message says why.
    """
    path = resolve(ref, progress=progress)
    import mlx.core as mx

    if device is None:
        device = "gpu" if mx.default_device() == mx.Device(mx.gpu) else "cpu"
    if device == "cpu" and preload_blas().source == "late":
        warnings.warn(
            "MLX computes with its own BLAS, about 25 times slower than OpenBLAS, because mlx.core was "
            "imported first: import offbook.runtime.models.load (or call preload_blas()) before mlx.core",
            RuntimeWarning,
            stacklevel=2,
        )
    (progress or no_progress)("load", 0, 0)
    with mx.stream(mx.cpu if device == "cpu" else mx.gpu):
        model, config = _load_weights(path)
        dtype = _to_device_dtype(model, device, lazy=compact)
        if latent and config.get("model_type") == "deepseek_v2":
            from offbook.runtime.models.deepseek_v2 import to_latent

            model = to_latent(model)
        if compact and device == "cpu":
            from offbook.runtime.models import linear

            linear.install(model, release=True)
        _evaluate_everything(model)
    limit = context_limit(config)
    tokenizer = _load_tokenizer(path, config)
    has_template = bool(tokenizer.has_chat_template)
    if not has_template:
        adds_bos = _adds_bos(tokenizer)
        tokenizer.chat_template = PLAIN_TEMPLATE.replace("add_bos", "true" if adds_bos else "false")
        tokenizer._tokenizer.chat_template = tokenizer.chat_template
        tokenizer.has_chat_template = True
    from offbook.runtime.models.packed import weights_bytes

    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=config,
        path=path,
        fingerprint=fingerprint(
            path, config=config, chat_template=str(tokenizer.chat_template or ""), dtype=dtype
        ),
        ref=ref,
        context_limit=limit,
        eos_token_ids=frozenset(tokenizer.eos_token_ids),
        has_chat_template=has_template,
        dtype=dtype,
        weights_bytes=weights_bytes(model),
    )


def context_limit(config: dict[str, Any]) -> int:
    """Tokens the model was made for, from its configuration (nested ``text_config`` included)."""
    for scope in (config, config.get("text_config") or {}):
        for key in (
            "max_position_embeddings",
            "max_seq_len",
            "model_max_length",
            "n_positions",
            "seq_length",
        ):
            value = scope.get(key)
            if isinstance(value, int) and value > 0:
                return value
    raise ModelError(
        "the model's config.json does not say how long a context may be (max_position_embeddings)"
    )


def _load_weights(path: Path) -> tuple[Any, dict[str, Any]]:
    """The mlx-lm model, its arrays not read yet, and the effective configuration."""
    from mlx_lm.utils import load_model

    try:
        model, config = load_model(path, lazy=True)
    except FileNotFoundError as exc:
        raise ModelError(f"the model at {path} is incomplete: {exc}") from exc
    except RuntimeError as exc:  # how MLX reports an unreadable safetensors file
        raise ModelError(f"the weights at {path} cannot be read (truncated or damaged?): {exc}") from exc
    except Exception as exc:  # the model's own code raises whatever it likes on a strange configuration
        raise ModelError(f"the model at {path} does not load: {exc}") from exc
    return model, config


def _to_device_dtype(model: Any, device: str, *, lazy: bool) -> str:
    """Bring all weights to what the device computes fast with; returns that dtype.

    ``lazy`` leaves it to whoever uses a weight first.
    """
    import mlx.core as mx

    if device == "cpu":
        _dequantise(model, lazy=lazy)
        model.set_dtype(mx.float32)
        return "float32"
    kinds = {array.dtype for array in _arrays(model.parameters()) if mx.issubdtype(array.dtype, mx.floating)}
    if mx.float32 in kinds:
        # A GPU gains nothing from float32 weights; bfloat16 has their range.
        model.set_dtype(mx.bfloat16)
        return "bfloat16"
    return "bfloat16" if mx.bfloat16 in kinds else "float16"


def _dequantise(model: Any, *, lazy: bool) -> None:
    """Replace every quantised layer by a float32 one, in place."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_unflatten
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

    for name, module in model.named_modules():
        if isinstance(module, nn.QuantizedLinear):
            cls: Any = nn.Linear
        elif isinstance(module, nn.QuantizedEmbedding):
            cls = nn.Embedding
        elif isinstance(module, QuantizedSwitchLinear):
            cls = SwitchLinear
        else:
            continue
        scales, biases = module.scales, module.get("biases")
        if module.mode == "affine":  # with float32 factors the product is not rounded to 16 bits
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        weight = mx.dequantize(
            module.weight, scales, biases, group_size=module.group_size, bits=module.bits, mode=module.mode
        )
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.weight = weight.astype(mx.float32)
        if "bias" in module:
            layer.bias = module.bias
        if not lazy:
            mx.eval(layer.parameters())
        # One layer at a time: the packed and the plain model never lie in memory together.
        model.update_modules(tree_unflatten([(name, layer)]))


def _evaluate_everything(model: Any) -> None:
    """Evaluate all arrays the model holds, module by module, those that are no parameters too (RoPE
    frequencies): an array that is still a promise belongs to the thread that made it."""
    import mlx.core as mx

    for module in model.modules():
        arrays = [*_arrays(dict(module)), *_arrays(vars(module))]
        if arrays:
            mx.eval(arrays)


def _arrays(value: Any) -> Iterator[mx.array]:
    """The arrays in nested containers; a module among them speaks for itself."""
    import mlx.core as mx
    import mlx.nn as nn

    if isinstance(value, nn.Module):
        return
    if isinstance(value, mx.array):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _arrays(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _arrays(item)


def _load_tokenizer(path: Path, config: dict[str, Any]) -> Any:
    from mlx_lm.utils import load_tokenizer

    try:
        # Without an answer transformers would ask on the terminal whether to run a model's own code.
        extra = {"trust_remote_code": False}
        return load_tokenizer(path, extra, eos_token_ids=config.get("eos_token_id"))
    except Exception as exc:  # third parties' parsers raise whatever they like
        raise ModelError(f"the tokenizer at {path} does not load: {exc}") from exc


def _adds_bos(tokenizer: Any) -> bool:
    bos = tokenizer.bos_token_id
    return bos is not None and bos in tokenizer.encode("")
