"""Train the tiny DeepSeek-V2 checkpoint that the tests and the quality benchmark use.

No DeepSeek-V2 weights are small enough to ship, and random weights say nothing about the quality of a
quantised cache. So this script trains one, with mlx-lm's own ``deepseek_v2`` code: multi-head latent
attention with YaRN, one dense layer, then mixtures of experts with a shared one. The text is the English
prose that ships with CPython: the language reference in ``pydoc_data.topics`` and the docstrings of the
standard library. Some topics and every sixteenth module are held out; what they share with the rest is
dropped from the training part.

    python -m benchmarks.train_deepseek_tiny --out tests/data/deepseek_tiny

writes config.json, model.safetensors (bfloat16), tokenizer.json, tokenizer_config.json, heldout.txt and
train.log. Everything is seeded; another Python version has other texts (their hash is in the log) and gives
other weights. Takes about half an hour on one CPU core.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import ctypes
import hashlib
import json
import math
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

with contextlib.suppress(OSError):  # before mlx: its wheel links the reference BLAS, 25 times slower
    ctypes.CDLL("libopenblas.so.0", mode=ctypes.RTLD_GLOBAL)

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import deepseek_v2
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SEED = 20240514
VOCABULARY = 2048
CONTEXT = 2048
BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
SPECIALS = [BEGIN, END, PAD, "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SYSTEM = "You explain the Python language and its library."
HELD_OUT_TOPICS = ("debugger", "import", "string-methods", "typesmapping")

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": VOCABULARY,
    "hidden_size": 224,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "topk_method": "greedy",
    "kv_lora_rank": 128,
    "q_lora_rank": None,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class Phase:
    """Steps at one sequence length: short ones first, because attention's cost grows with the square."""

    steps: int
    batch: int
    length: int


PHASES = (Phase(800, 8, 256), Phase(60, 4, 512), Phase(200, 1, 2048))

# The learning rate by step, as a share of its full size, linear in between.
RATES = ((0, 0.02), (49, 1.0), (616, 1.0), (800, 0.8009), (1060, 0.05))

# Here the optimiser starts anew from the stored weights, so that an interrupted run can go on from this step.
RESTART = 800


# ---------------------------------------------------------------------------------------------- the texts


@dataclass(frozen=True)
class Document:
    """One piece of prose; `about` names what it explains, for the dialogue form."""

    name: str
    paragraphs: tuple[str, ...]
    about: tuple[tuple[str, str], ...] = ()


def topics() -> Iterator[Document]:
    from pydoc_data.topics import topics as texts

    for name in sorted(texts):
        yield Document(f"topic:{name}", tuple(texts[name].strip().split("\n\n")))


def modules() -> Iterator[Document]:
    """The docstrings of each module of the standard library, in the order of the source."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if {"site-packages", "test", "tests", "idle_test", "pydoc_data"} & set(parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        module = ".".join(parts).removesuffix(".__init__")
        about = [(name, text) for name, text in _docstrings(tree, module) if len(text) >= 40]
        if about:
            paragraphs = [p for name, text in about for p in (name, *text.split("\n\n"))]
            yield Document(f"module:{module}", tuple(paragraphs), tuple(about))


def _docstrings(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        text = ast.get_docstring(node)
        if text:
            yield name, text
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _docstrings(child, f"{name}.{child.name}")


@dataclass(frozen=True)
class Corpus:
    train: list[str]
    dialogues: list[tuple[str, str]]
    held_out: list[str]
    digest: str


def gather(rng: np.random.Generator) -> Corpus:
    """Split the texts; a paragraph is used once, and never on both sides of the split."""
    documents = [*topics(), *modules()]
    module_number = 0
    held, kept = [], []
    for document in documents:
        if document.name.startswith("topic:"):
            out = document.name.removeprefix("topic:") in HELD_OUT_TOPICS
        else:
            out, module_number = module_number % 16 == 7, module_number + 1
        (held if out else kept).append(document)
    seen: set[str] = set()

    def fresh(document: Document) -> str:
        lines = []
        for paragraph in document.paragraphs:
            key = " ".join(paragraph.split())
            if key not in seen:
                seen.add(key)
                lines.append(paragraph)
        return "\n\n".join(lines)

    held_out = [text for text in map(fresh, held) if len(text) >= 400]
    held_paragraphs = set(seen)
    train = [text for text in map(fresh, kept) if len(text) >= 200]
    dialogues = [
        (name, text)
        for document in kept
        for name, text in document.about
        if len(text) <= 2000 and not any(" ".join(p.split()) in held_paragraphs for p in text.split("\n\n"))
    ]
    dialogues = [dialogues[i] for i in sorted(rng.choice(len(dialogues), len(dialogues) // 5, replace=False))]
    digest = hashlib.sha256("\0".join([*train, *held_out]).encode()).hexdigest()[:16]
    return Corpus(train, dialogues, held_out, digest)


# ------------------------------------------------------------------------------------------- the tokenizer


def train_tokenizer(texts: list[str], out: Path) -> Tokenizer:
    """Byte-level BPE on the training texts; every byte string can be encoded and gets back unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=SPECIALS,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return tokenizer


def token_stream(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """The token ids of all texts as one row; each text gets its end and, unless it has one, its beginning."""
    begin, end = tokenizer.token_to_id(BEGIN), tokenizer.token_to_id(END)
    ids: list[int] = []
    for text in texts:
        ids += [begin, *tokenizer.encode(text, add_special_tokens=False).ids, end]
    return np.array(ids, dtype=np.uint16)


def dialogue(name: str, text: str) -> str:
    """One docstring as the chat template renders it, without the first and last token of a document."""
    return f"<|system|>{SYSTEM}<|end|><|user|>What is {name}?<|end|><|assistant|>{text}"


# --------------------------------------------------------------------------------------------- the training


def all_experts(balance: list[mx.array]) -> Callable[[deepseek_v2.DeepseekV2MoE, mx.array], mx.array]:
    """The forward pass of the mixture with every expert computed: the same function, quicker on a CPU.

    mlx-lm gathers the chosen experts token by token; a step took 1.4 to 2.4 s that way, 1.0 s with all four
    experts computed and the others weighed by zero. Appends each layer's load-balancing loss to `balance`.
    """

    def forward(self: deepseek_v2.DeepseekV2MoE, x: mx.array) -> mx.array:
        experts, width = self.config.n_routed_experts, x.shape[-1]
        chosen, scores = self.gate(x)
        weights = mx.put_along_axis(mx.zeros((*x.shape[:-1], experts)), chosen, scores, axis=-1)
        flat, weights = x.reshape(-1, width), weights.reshape(-1, experts)
        share = mx.stop_gradient((weights > 0).astype(mx.float32).mean(axis=0))
        odds = mx.softmax(flat @ self.gate.weight.T, axis=-1).mean(axis=0)
        balance.append((share * odds).sum() * experts / self.gate.top_k)
        up = flat @ self.switch_mlp.up_proj.weight.swapaxes(-1, -2)
        gate = flat @ self.switch_mlp.gate_proj.weight.swapaxes(-1, -2)
        hidden = nn.silu(gate) * up * weights.T[..., None]
        y = (hidden @ self.switch_mlp.down_proj.weight.swapaxes(-1, -2)).sum(axis=0).reshape(x.shape)
        return y + self.shared_experts(x)

    return forward


def build() -> deepseek_v2.Model:
    mx.random.seed(SEED)
    model = deepseek_v2.Model(deepseek_v2.ModelArgs.from_dict(CONFIG))
    depth = math.sqrt(2 * CONFIG["num_hidden_layers"])
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight /= depth
        if isinstance(layer.mlp, deepseek_v2.DeepseekV2MoE):
            layer.mlp.gate.weight = 0.02 * mx.random.normal(layer.mlp.gate.weight.shape)
    mx.eval(model.parameters())
    return model


class ExpertMuon(optim.Muon):
    """Muon that treats stacked experts as separate matrices (the library's would flatten them into one)."""

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        if gradient.ndim != 3:
            return super().apply_single(gradient, parameter, state)
        velocity, parts = [], []
        for expert in range(gradient.shape[0]):
            own = {"v": state["v"][expert]}
            parts.append(super().apply_single(gradient[expert], parameter[expert], own))
            velocity.append(own["v"])
        state["v"] = mx.stack(velocity)
        return mx.stack(parts)


def optimizer() -> optim.MultiOptimizer:
    """Muon for the matrices of the layers (fewer steps than AdamW to the same loss), AdamW for the rest."""

    def is_matrix(path: str, value: mx.array) -> bool:
        return value.ndim >= 2 and not any(n in path for n in ("embed_tokens", "lm_head", "mlp.gate.weight"))

    return optim.MultiOptimizer(
        [
            ExpertMuon(MUON_RATE, momentum=0.95, weight_decay=0.0),
            optim.AdamW(ADAM_RATE, betas=[0.9, 0.95], weight_decay=0.01),
        ],
        [is_matrix],
    )


MUON_RATE, ADAM_RATE = 0.02, 3e-3


def rate(step: int) -> float:
    return float(np.interp(step, *zip(*RATES, strict=True)))


def mean_loss(model: deepseek_v2.Model, windows: np.ndarray, last: int | None = None) -> float:
    """Mean negative log likelihood, nats, over `windows` [n, length + 1], or over their `last` positions."""
    total = 0.0
    for row in windows:
        ids = mx.array(row.astype(np.int32))[None]
        losses = nn.losses.cross_entropy(model(ids[:, :-1]), ids[:, 1:])
        total += (losses if last is None else losses[:, -last:]).mean().item()
    return total / len(windows)


def cut(ids: np.ndarray, length: int) -> np.ndarray:
    """Non-overlapping windows of `length` inputs and the target after each: [n, length + 1]."""
    n = (len(ids) - 1) // length
    return np.stack([ids[i * length : (i + 1) * length + 1] for i in range(n)])


def unigram_perplexity(train: np.ndarray, held_out: np.ndarray) -> float:
    """Perplexity of `held_out` under the token frequencies of `train`, with one added to each count."""
    counts = Counter(train.tolist())
    total = len(train) + VOCABULARY
    return math.exp(-sum(math.log((counts[t] + 1) / total) for t in held_out.tolist()) / len(held_out))


def save(model: deepseek_v2.Model, out: Path) -> None:
    weights = {name: value.astype(mx.bfloat16) for name, value in tree_flatten(model.parameters())}
    partial = out / "partial.safetensors"
    mx.save_safetensors(str(partial), weights, metadata={"format": "mlx"})
    partial.rename(out / "model.safetensors")


def stored_weights(out: Path) -> list[tuple[str, mx.array]]:
    stored = mx.load(str(out / "model.safetensors"))
    return [(name, value.astype(mx.float32)) for name, value in stored.items()]


def train(out: Path, *, resume: bool = False) -> None:
    """Train, or with `resume` go on from the weights in `out`, which are those of step `RESTART`."""
    started = time.monotonic()
    rng = np.random.default_rng(SEED)
    out.mkdir(parents=True, exist_ok=True)
    log_file = (out / "train.log").open("a" if resume else "w", encoding="utf-8")

    def log(line: str) -> None:
        print(line, flush=True)
        print(line, file=log_file, flush=True)

    corpus = gather(rng)
    tokenizer = train_tokenizer(corpus.train, out)
    (out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    texts = [*corpus.train, *(dialogue(name, text) for name, text in corpus.dialogues)]
    ids = token_stream(tokenizer, [texts[i] for i in rng.permutation(len(texts))])
    # The file and the stream are cut alike, so that whoever reads the file gets the tokens of the log.
    held_text = "\n\n".join(corpus.held_out)
    (out / "heldout.txt").write_text(held_text, encoding="utf-8")
    held = np.array(tokenizer.encode(held_text).ids, dtype=np.uint16)
    windows = cut(held, CONTEXT)

    model = build()
    size = sum(value.size for _, value in tree_flatten(model.parameters()))
    if resume:
        log(f"resumed at step {RESTART}")
    log(f"python {sys.version.split()[0]}, texts {corpus.digest}, seed {SEED}, parameters {size}")
    log(f"documents {len(corpus.train)}, dialogues {len(corpus.dialogues)}, held out {len(corpus.held_out)}")
    log(f"tokens: train {len(ids)}, held out {len(held)} ({len(windows)} windows of {CONTEXT})")
    log(f"unigram perplexity, held out: {unigram_perplexity(ids, held):.2f}")

    balance: list[mx.array] = []
    gathered, deepseek_v2.DeepseekV2MoE.__call__ = deepseek_v2.DeepseekV2MoE.__call__, all_experts(balance)

    def objective(batch: mx.array) -> tuple[mx.array, mx.array]:
        balance.clear()
        loss = nn.losses.cross_entropy(model(batch[:, :-1]), batch[:, 1:], reduction="mean")
        return loss + 0.01 * sum(balance, mx.array(0.0)) / len(balance), loss

    step_function = nn.value_and_grad(model, objective)
    optimiser = optimizer()
    steps, step, seen, recent = sum(p.steps for p in PHASES), 0, 0, []
    for phase in PHASES:
        for _ in range(phase.steps):
            starts = rng.integers(0, len(ids) - phase.length - 1, phase.batch)
            seen += phase.batch * phase.length
            if resume and step < RESTART:
                step += 1
                continue
            if step == RESTART:
                model.load_weights(stored_weights(out))
                optimiser = optimizer()
            batch = np.stack([ids[s : s + phase.length + 1] for s in starts]).astype(np.int32)
            for part, base in zip(optimiser.optimizers, (MUON_RATE, ADAM_RATE), strict=True):
                part.learning_rate = mx.array(base * rate(step))
            (_, loss), gradients = step_function(mx.array(batch))
            gradients, norm = optim.clip_grad_norm(gradients, 1.0)
            optimiser.update(model, gradients)
            mx.eval(model.parameters(), optimiser.state, loss)
            recent.append(loss.item())
            step += 1
            if step % 20 == 0 or step == steps:
                seconds = time.monotonic() - started
                log(
                    f"step {step}/{steps} length {phase.length} tokens {seen} "
                    f"loss {sum(recent) / len(recent):.4f} norm {norm.item():.2f} seconds {seconds:.0f}"
                )
                recent.clear()
            if step % 200 == 0:
                save(model, out)
                perplexity = math.exp(mean_loss(model, windows[:4]))
                log(f"step {step} held-out perplexity (4 windows) {perplexity:.2f}")

    save(model, out)
    deepseek_v2.DeepseekV2MoE.__call__ = gathered
    # What the log says is about the stored bfloat16 weights, computed in float32 by mlx-lm's unchanged code.
    model.load_weights(stored_weights(out))
    whole, quarter = mean_loss(model, windows), mean_loss(model, windows, CONTEXT // 4)
    log(f"held-out perplexity ({len(windows)} windows of {CONTEXT}): {math.exp(whole):.4f}")
    log(f"held-out perplexity, last quarter of the windows: {math.exp(quarter):.4f}")
    log(f"held-out perplexity, first 4 windows: {math.exp(mean_loss(model, windows[:4])):.4f}")
    log(f"held-out perplexity, first window: {math.exp(mean_loss(model, windows[:1])):.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("tests/data/deepseek_tiny"), help="folder to write")
    parser.add_argument(
        "--resume", action="store_true", help=f"go on from the weights of step {RESTART} in that folder"
    )
    arguments = parser.parse_args()
    train(arguments.out, resume=arguments.resume)


if __name__ == "__main__":
    main()
