"""Record what llama.cpp says about our embedded models' GGUF files; the tests hold us to it.

Run by hand, in an environment of its own (not a test, not needed by users):

    python -m venv /tmp/llama && /tmp/llama/bin/pip install xllamacpp==2026.10.11549 gguf numpy
    /tmp/llama/bin/python tests/runtime/models/reference/record.py smollm2 FILE.gguf OUT.json

It records, for one file:

- ``tokenize``: the ids of tricky texts, special tokens parsed, no BOS added;
- ``greedy``: greedy continuations of several prompts on the file itself. llama.cpp rounds activations to
  8 bits for its quantised products, so its logits carry an error of some hundredths;
- ``greedy_float32``: the same on the same weights dequantised to a float32 GGUF file, where nothing is
  rounded. Each step carries the log-probabilities of the two best ids, so that a test can show
  a difference to be a near-tie instead of assuming it.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

TEXTS = [
    "",
    " ",
    "  ",
    "Hello, world!",
    " leading space",
    "trailing space ",
    "a  b   c    d     e",
    "tabs\tand\t\ttabs",
    "line\nbreaks\n\nand\r\nmore\n",
    "\n\n\n   \n",
    "1234567890 3.14159 1,000,000 2024-05-17",
    "x1y22z333 room4242b",
    "½ ² Ⅷ ٣ 一二三",
    "don't we'll I'VE they'd it's O'Neill",
    "naïve café façade Ångström Straße",
    "Привет, мир! Καλημέρα κόσμε.",
    "日本語のテキストと漢字。中文字符。한국어",
    "שלום عربى हिन्दी ไทย",
    "🙂🙃 👩‍👩‍👧‍👦 🇫🇷 👍🏽",
    "e\u0301 \u00e9 \ufb01 \u200b zero\u200dwidth \ufeff",
    "def f(x):\n    return x**2  # comment\n\tif True:\n",
    "https://example.com/a_b?c=d&e=%20f#g",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|><repo_name> <|im_start|",
    "<bos><start_of_turn>user\nHi<end_of_turn>\n<eos><unused7>",
    "<h1>Title</h1><table><td>x</td></table>",
    "!!! ... ??? --- ___ ### $$$ ^^^ &&& *** ((( ))) [[ ]] {{ }}",
    "\u0000\u0001\u001f control",
    "CamelCaseIdentifier snake_case_identifier SCREAMING_CASE",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "𝕬𝖇𝖈 𝟙𝟚𝟛 ≠ ≤ ∑ ∫ √",
    "aaaaaaaaaaaaaaaaaaaaaaaa bbbbbbbbbbbbbbbb",
    "mixed \u00a0 nbsp \u3000 ideographic space",
    "▁ the SentencePiece mark ▁▁ itself Ġ",
]

CHAT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
PROMPTS = {
    "smollm2": [
        CHAT.format("What is the capital of France?"),
        CHAT.format("Name three colours of the rainbow."),
        CHAT.format("Write one sentence about a lighthouse keeper."),
        CHAT.format("What is 12 plus 30?"),
        "Once upon a time, in a small village by the sea,",
        "def fibonacci(n):\n",
        "The quick brown fox " * 60,
    ],
    "gemma3": [
        "<bos>The capital of France is",
        "<bos>Once upon a time, in a small village by the sea,",
        "<bos>def fibonacci(n):\n",
        "<bos>Water boils at a temperature of",
        "<bos>Die Hauptstadt von Deutschland ist",
        # Longer than the window of 512, so that what lies behind it must not be seen.
        "<bos>" + " ".join(f"Sentence number {n} speaks of the {n}th village." for n in range(60)),
    ],
}
STEPS = 32


class LlamaServer:
    """llama.cpp in this process, spoken to through its HTTP interface on a loopback port."""

    def __init__(self, path: Path) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = 2048
        params.n_parallel = 1
        params.warmup = False
        params.cpuparams.n_threads = 2
        params.cache_type_k = xllamacpp.ggml_type.GGML_TYPE_F32
        params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._server = xllamacpp.Server(params)
        self._url = self._server.listening_address

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as reply:
            return json.load(reply)

    def tokenize(self, text: str) -> list[int]:
        body = {"content": text, "add_special": False, "parse_special": True}
        ids: list[int] = self.post("/tokenize", body)["tokens"]
        return ids

    def greedy(self, prompt: list[int]) -> dict[str, Any]:
        reply = self.post(
            "/completion",
            {
                "prompt": prompt,
                "n_predict": STEPS,
                "temperature": 0.0,
                "n_probs": 2,
                "return_tokens": True,
                "cache_prompt": False,
                "repeat_penalty": 1.0,
            },
        )
        best = [
            [[entry["id"], round(entry["logprob"], 5)] for entry in step["top_logprobs"]]
            for step in reply["completion_probabilities"]
        ]
        return {"ids": [step["id"] for step in reply["completion_probabilities"]], "best": best}


def dequantised_copy(source: Path, target: Path) -> None:
    """The same model with every tensor as float32."""
    import numpy as np
    from gguf import GGUFReader, GGUFValueType, GGUFWriter, quants

    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub)
    for tensor in reader.tensors:
        values = np.asarray(quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        writer.add_tensor(tensor.name, values.reshape([int(n) for n in reversed(tensor.shape)]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(kind: str, source: Path, out: Path) -> None:
    server = LlamaServer(source)
    prompts = [{"text": text, "ids": server.tokenize(text)} for text in PROMPTS[kind]]
    record: dict[str, Any] = {
        "engine": "llama.cpp through xllamacpp " + importlib.metadata.version("xllamacpp"),
        "file": source.name,
        "tokenize": [{"text": text, "ids": server.tokenize(text)} for text in TEXTS],
        "greedy": [{"prompt": prompt, **server.greedy(prompt["ids"])} for prompt in prompts],
    }
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "float32.gguf"
        dequantised_copy(source, copy)
        exact = LlamaServer(copy)
        record["greedy_float32"] = [exact.greedy(prompt["ids"]) for prompt in prompts]
    out.write_text(json.dumps(record, ensure_ascii=True, indent=None, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
