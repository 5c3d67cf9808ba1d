"""The command line: what it prints, and one sentence with exit code 2 for what cannot be done."""

import gc
import json
import subprocess
import sys

import mlx.core as mx
import pytest
from chunkdelta import cli
from chunkdelta.loop.memory import plan_memory
from chunkdelta.models import embedded
from chunkdelta.models.shapes import named_shape
from click.testing import CliRunner

JSON_KEYS = [
    "tokens",
    "chunk_size",
    "tokens_per_s",
    "planned_peak_bytes",
    "measured_peak_bytes",
    "kv_bytes",
    "state_bytes",
    "transient_bytes",
    "one_call_bytes",
]


def chunkdelta(*arguments):
    return CliRunner().invoke(cli.commands, [str(a) for a in arguments])


# ---------------------------------------------------------------------------- plan


def test_plan_prints_every_term():
    result = chunkdelta("plan", "9b", "--tokens", 131072, "--memory", 16)
    assert result.exit_code == 0
    for term in ("weights", "kv pages", "states", "transients", "workspace", "logits"):
        assert term in result.stdout
    assert "4,294,967,296" in result.stdout
    assert "Fits in 16.00 GB; the largest context" in " ".join(result.stdout.split())
    assert "One stock call" in result.stdout


def test_plan_as_json():
    options = ("--tokens", 40960, "--max-tokens", 100, "--chunk-size", 256, "--kv-format", "q8_0")
    result = chunkdelta("plan", "qwen3.5-27b", *options, "--memory", 24, "--json")
    assert result.exit_code == 0
    plan = json.loads(result.stdout)
    expected = plan_memory(
        named_shape("27b"), 40960, max_tokens=100, chunk_size=256, kv_format="q8_0"
    )
    assert plan["planned_peak_bytes"] == expected.total_bytes
    assert plan["kv_bytes"] == expected.kv_bytes
    assert plan["fits"] is True
    assert plan["largest_context"] == expected.largest_context(24_000_000_000)


@pytest.mark.parametrize(
    ("memory", "sentence"),
    [
        pytest.param(9, "Does not fit in 9.00 GB; the largest context that would is", id="context"),
        pytest.param(
            4, "Does not fit in 4.00 GB: weights, states and one chunk alone", id="weights"
        ),
    ],
)
def test_plan_says_what_would_fit(memory, sentence):
    result = chunkdelta("plan", "9b", "--memory", memory)
    assert result.exit_code == 0
    assert sentence in " ".join(result.stdout.split())


# ---------------------------------------------------------------------------- refusals


def config_only(path, **changes):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(embedded.CONFIG | changes))
    return path


@pytest.fixture
def unsupported(tmp_path):
    path = config_only(tmp_path / "kimi", model_type="kimi_linear")
    (path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    return path


def short_text(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("Only a few words.")
    return path


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        pytest.param(
            lambda d: ("plan", "gpt-2"), "a model directory or one of qwen3.5-9b", id="unknown-name"
        ),
        pytest.param(
            lambda d: ("plan", config_only(d / "m")), "expected model*.safetensors", id="no-weights"
        ),
        pytest.param(
            lambda d: ("plan", "9b", "--kv-format", "q3"), "bf16, q8_0", id="unknown-format"
        ),
        pytest.param(
            lambda d: ("prefill", "--model", d / "nowhere"),
            "expected a model directory with a readable config.json",
            id="no-directory",
        ),
        pytest.param(
            lambda d: ("prefill", "--model", config_only(d / "m")),
            "expected model*.safetensors",
            id="no-weights-to-run",
        ),
        pytest.param(
            lambda d: ("prefill", "--text", short_text(d), "--tokens", 100),
            "expected a text of at least 100 tokens; got 5 in",
            id="text-too-short",
        ),
        pytest.param(
            lambda d: ("prefill", "--text", d / "none.txt"), "readable UTF-8 text", id="no-text"
        ),
        pytest.param(
            lambda d: ("prefill", "--tokens", 1000, "--max-context", 1010, "--max-tokens", 16),
            "to fit into --max-context 1,010; got 1,000 + 16",
            id="beyond-max-context",
        ),
        pytest.param(
            lambda d: ("prefill", "--kv-format", "q3", "--tokens", 9), "bf16, q8_0", id="run-format"
        ),
    ],
)
def test_one_sentence_and_exit_code_2(make, sentence, tmp_path):
    result = chunkdelta(*make(tmp_path))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("chunkdelta: ")
    assert result.stderr.count("\n") == 1
    assert sentence in result.stderr


def test_unsupported_architecture(unsupported):
    for command in (("plan", unsupported), ("prefill", "--model", unsupported)):
        result = chunkdelta(*command)
        assert result.exit_code == 2
        assert "olmo_hybrid, qwen3_5" in result.stderr
        assert "got 'kimi_linear'" in result.stderr
        assert result.stderr.count("\n") == 1


def test_context_that_does_not_fit_names_the_largest_that_does(monkeypatch):
    monkeypatch.setattr("chunkdelta.measure.available_bytes", lambda: 100_000_000)
    result = chunkdelta("prefill", "--tokens", 100_000)
    assert result.exit_code == 2
    assert "a context of 100,016 tokens needs" in result.stderr
    assert "the largest context that fits is" in result.stderr
    assert result.stderr.count("\n") == 1


def test_script_exits_with_2(tmp_path):
    code = "import sys; from chunkdelta.cli import main; sys.argv[1:] = ['plan', 'gpt-2']; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------------------- doctor


def test_doctor_finds_this_environment_in_order():
    result = chunkdelta("doctor", "--json")
    findings = json.loads(result.stdout)
    assert result.exit_code == 0
    assert findings["extension ABI"] == "arrays are shared with mlx"
    assert "built for" in findings["mlx"]
    assert "threads" in findings["CPU kernels"]
    table = chunkdelta("doctor")
    assert table.exit_code == 0
    assert "wrong" not in table.stdout


def test_doctor_exits_with_1_when_something_is_wrong(monkeypatch):
    from chunkdelta import env

    monkeypatch.setattr(env, "_built_version", lambda: "0.31.0")
    result = chunkdelta("doctor")
    assert result.exit_code == 1
    assert "wrong" in result.stdout


# ---------------------------------------------------------------------------- prefill


@pytest.fixture
def tiny(monkeypatch):
    """The embedded model with a narrower embedding: everything else is as the user gets it."""
    monkeypatch.setitem(embedded.CONFIG, "hidden_size", 32)
    monkeypatch.setitem(embedded.CONFIG, "intermediate_size", 32)


def test_prefill_prints_a_table_and_goes_on(tiny):
    result = chunkdelta("prefill", "--tokens", 100, "--chunk-size", 64, "--max-tokens", 3)
    assert result.exit_code == 0, result.stderr
    for term in ("tokens/s", "planned peak", "measured peak", "transient per chunk", "one call"):
        assert term in result.stdout
    assert "3 tokens more: " in result.stdout


def held_by_other_tests() -> int:
    """What a process of its own would not hold: arrays of other modules' fixtures."""
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


def test_prefill_as_json(tiny):
    before = held_by_other_tests()
    result = chunkdelta("prefill", "--tokens", 100, "--chunk-size", 64, "--json")
    assert result.exit_code == 0, result.stderr
    run = json.loads(result.stdout)
    assert list(run) == JSON_KEYS
    assert (run["tokens"], run["chunk_size"]) == (100, 64)
    assert 0 < run["measured_peak_bytes"] - before <= run["planned_peak_bytes"]


def test_prefill_compares_with_stock_and_plots(tiny, tmp_path):
    plot = tmp_path / "run.png"
    options = ("--tokens", 70, "--chunk-size", 32, "--max-tokens", 1, "--compare", "--plot", plot)
    result = chunkdelta("prefill", *options)
    assert result.exit_code == 0, result.stderr
    assert "step 32" in result.stdout
    assert "step 2,048" in " ".join(result.stdout.split())
    assert plot.read_bytes().startswith(b"\x89PNG")
    compared = json.loads(chunkdelta("prefill", *options[:-2], "--json").stdout)
    assert [run["chunk_size"] for run in compared["stock"]] == [32, 2048]
    assert all(run["measured_peak_bytes"] > 0 for run in compared["stock"])


def test_a_full_disk_or_a_wrong_name_for_the_plot_is_refused(tiny, tmp_path):
    options = ("--tokens", 9, "--max-tokens", 0)
    result = chunkdelta("prefill", *options, "--plot", tmp_path / "no" / "run.png")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("chunkdelta: [Errno 2] No such file")


@pytest.fixture
def model_directory(tmp_path):
    """A model directory as mlx-lm writes them, with a tokenizer of bytes."""
    from mlx_lm.utils import save_config, save_model
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = tmp_path / "tiny-qwen"
    config = embedded.CONFIG | {"vocab_size": 512, "hidden_size": 64}
    model = embedded.build(**config)
    config["model_type"] = "qwen3_5"  # mlx-lm's name of the file that has this architecture
    save_model(path, model)
    save_config(dict(config), path / "config.json")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    return path


def test_prefill_of_a_model_directory(model_directory, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 5)
    options = ("--model", model_directory, "--text", text, "--tokens", 150, "--chunk-size", 64)
    before = held_by_other_tests()
    result = chunkdelta("prefill", *options, "--json")
    assert result.exit_code == 0, result.stderr
    run = json.loads(result.stdout)
    assert run["tokens"] == 150
    assert 0 < run["measured_peak_bytes"] - before <= run["planned_peak_bytes"]
    planned = json.loads(
        chunkdelta(
            "plan",
            model_directory,
            "--tokens",
            150,
            "--max-tokens",
            16,
            "--chunk-size",
            64,
            "--json",
        ).stdout
    )
    assert planned["planned_peak_bytes"] == run["planned_peak_bytes"]


def test_torn_weights_are_refused(model_directory):
    weights = next(model_directory.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1000])
    result = chunkdelta("prefill", "--model", model_directory, "--tokens", 20)
    assert result.exit_code == 2
    assert "expected a model directory that mlx-lm loads" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_ctrl_c_ends_the_run_cleanly():
    """Interrupted after the first chunk: a sentence, exit code 130, no traceback."""
    code = (
        "import os, signal\n"
        "from chunkdelta import cli, measure\n"
        "from chunkdelta.models import embedded\n"
        "embedded.CONFIG |= {'hidden_size': 32, 'intermediate_size': 32}\n"
        "real = measure.prefill\n"
        "def interrupted(*args, progress, **kwargs):\n"
        "    def watch(done, total):\n"
        "        progress(done, total)\n"
        "        if done == 32:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "    return real(*args, progress=watch, **kwargs)\n"
        "measure.prefill = interrupted\n"
        "import sys\n"
        "sys.argv[1:] = ['prefill', '--tokens', '128', '--chunk-size', '32', '--json']\n"
        "cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert "chunkdelta: stopped after 32 of 128 tokens" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_prefix_is_kept_and_taken_up_again(tiny, tmp_path):
    saved = tmp_path / "prefix.safetensors"
    common = ("prefill", "--chunk-size", 64, "--max-tokens", 8, "--json")
    first = chunkdelta(*common, "--tokens", 128, "--save-prefix", saved)
    assert first.exit_code == 0, first.output
    straight = chunkdelta(*common, "--tokens", 192)
    longer = chunkdelta(*common, "--tokens", 192, "--load-prefix", saved)
    assert longer.exit_code == 0, longer.output
    result = json.loads(longer.stdout)
    assert (result["tokens"], result["reused_tokens"]) == (192, 128)
    assert "reused_tokens" not in json.loads(straight.stdout)

    for tokens, sentence in ((128, "shorter than its 128 tokens; got 128"), (64, "got 128")):
        refused = chunkdelta(*common, "--tokens", tokens, "--load-prefix", saved)
        assert refused.exit_code == 2
        assert sentence in refused.stderr
    other = tmp_path / "other.txt"
    other.write_text("Another text altogether. " * 200)
    refused = chunkdelta(*common, "--tokens", 192, "--text", other, "--load-prefix", saved)
    assert refused.exit_code == 2
    assert "of another text" in refused.stderr
    for file, sentence in (("missing.safetensors", "does not exist"), ("p.bin", "ends in")):
        flag = "--load-prefix" if "missing" in file else "--save-prefix"
        refused = chunkdelta(*common, "--tokens", 64, flag, tmp_path / file)
        assert refused.exit_code == 2
        assert sentence.replace("ends in", "to end in") in refused.stderr
