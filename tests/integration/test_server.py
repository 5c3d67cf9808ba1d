"""mlx_lm.server on an accelerated model: concurrent and repeated requests over HTTP."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from string import ascii_letters

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from tests.integration.tiny_models import QWEN3_5, build

# As docs/integration/mlx-lm.md shows it.
SERVE = """
import sys
from mlx_lm import server
from chunkdelta.models.mlx_lm import accelerate

if sys.argv.pop(1) == "accelerated":
    stock_load = server.load

    def load(*args, **kwargs):
        model, *rest = stock_load(*args, **kwargs)
        return (accelerate(model), *rest)

    server.load = load
server.main()
"""


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory) -> Path:
    """A model whose tokens are bytes, as files."""
    path = tmp_path_factory.mktemp("tiny")
    vocab = {c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}
    size = len(vocab) + 1
    weights = dict(tree_flatten(build("qwen3_5", vocab_size=size).parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    config = {"model_type": "qwen3_5", "text_config": QWEN3_5 | {"vocab_size": size}}
    (path / "config.json").write_text(json.dumps(config | {"eos_token_id": size - 1}))
    tokenizer = Tokenizer(BPE(vocab | {"<eos>": size - 1}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(path)
    return path


@contextlib.contextmanager
def serving(kind: str, model: Path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-c", SERVE, kind, "--model", str(model), "--port", str(port)]
    log = model / f"{kind}.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*command, "--prefill-step-size", "32", "--log-level", "ERROR"], stderr=stderr
        )
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        process.wait(timeout=30)


def complete(port: int, text: str, max_tokens: int) -> dict:
    body = {"prompt": text, "max_tokens": max_tokens, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def conversation(kind: str, model: Path) -> list[str]:
    """Five requests at once, then each again with more words: the prompt cache is hit."""
    with serving(kind, model) as port:
        rng = random.Random(0)
        prompts = ["".join(rng.choices(ascii_letters, k=n)) for n in (70, 3, 41, 42, 2)]
        answers = []
        for more in ("", "and so on"):
            with ThreadPoolExecutor(5) as pool:
                full = [p + more for p in prompts]
                answers += pool.map(lambda p: complete(port, p, 12), full)
        assert any(a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers)
        return [a["choices"][0]["text"] for a in answers]


def test_server_answers_as_stock(model_directory: Path):
    got = conversation("accelerated", model_directory)
    assert len(got) == 10
    assert all(got)
    assert got == conversation("stock", model_directory)
