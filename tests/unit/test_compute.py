"""The thread pool's and workspace's public face."""

import os
import subprocess
import sys

import pytest
from chunkdelta import _ext


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_active_isa_is_the_best_supported_one():
    assert _ext.active_isa() == os.environ.get("CHUNKDELTA_ISA", _ext.supported_isas()[-1])


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_isa_is_forced_by_the_environment(isa):
    done = run(
        "from chunkdelta import _ext; print(_ext.active_isa())",
        CHUNKDELTA_ISA=isa,
    )
    if isa in _ext.supported_isas():
        assert done.stdout.strip() == isa
    else:
        assert "[isa] expected" in done.stderr


def test_unknown_isa_is_refused():
    done = run("from chunkdelta import _ext; _ext.active_isa()", CHUNKDELTA_ISA="sse9")
    assert done.returncode != 0
    assert "[isa] expected CHUNKDELTA_ISA in {baseline, avx2, avx512}; got sse9" in done.stderr


def test_num_threads_follows_the_environment():
    code = "from chunkdelta import _ext; print(_ext.num_threads())"
    assert run(code, CHUNKDELTA_NUM_THREADS="3").stdout.strip() == "3"
    done = run(code, CHUNKDELTA_NUM_THREADS="none")
    assert "[threads] expected CHUNKDELTA_NUM_THREADS in 1..1024; got none" in done.stderr


def test_set_num_threads_refuses_zero():
    with pytest.raises(ValueError, match=r"\[set_num_threads\] expected n >= 1; got 0"):
        _ext.set_num_threads(0)
