"""The C++ runtime (runtime/) as Python sees it: built on first use, called through ctypes."""

from __future__ import annotations

import ctypes as C
import functools
from pathlib import Path

from .toolchain import (
    PACKAGE,
    CompileError,
    cache_directory,
    digest,
    publish,
    scratch_file,
    toolchain,
)

FLAGS = ["-std=c++17", "-O2", "-g1", "-Wall", "-Wextra", "-fPIC", "-fvisibility=hidden"]
NUM_OPS = 8


class Site(C.Structure):
    """mh_site of runtime/abi.h."""

    _fields_ = [("file", C.c_char_p), ("line", C.c_int), ("column", C.c_int)]


class Bind(C.Structure):
    """mh_bind of runtime/abi.h."""

    _fields_ = [("kind", C.c_int), ("index", C.c_int), ("required", C.c_int)]


class Entry(C.Structure):
    """mh_entry of runtime/abi.h."""

    _fields_ = [
        ("name", C.c_char_p),
        ("call", C.c_void_p),
        ("binds", C.POINTER(Bind)),
        ("num_binds", C.c_int),
        ("max_threads", C.c_int),
    ]


class RawReport(C.Structure):
    """Report of runtime/report.h."""

    _fields_ = [
        ("kind", C.c_int),
        ("count", C.c_int),
        ("pc", C.c_uint64),
        ("other_pc", C.c_uint64),
        ("thread", C.c_int),
        ("threadgroup", C.c_uint32 * 3),
        ("text", C.c_char * 320),
    ]


class RawCounters(C.Structure):
    """Counters of runtime/launch.h."""

    _fields_ = [
        ("device_bytes_read", C.c_uint64),
        ("device_bytes_written", C.c_uint64),
        ("threadgroup_bytes_read", C.c_uint64),
        ("threadgroup_bytes_written", C.c_uint64),
        ("threadgroup_memory", C.c_uint64),
        ("threadgroup_barriers", C.c_uint64),
        ("ops", C.c_uint64 * NUM_OPS),
        ("accesses", C.c_uint64),
        ("switches", C.c_uint64),
    ]


class RawBarrierSite(C.Structure):
    """BarrierSite of runtime/launch.h."""

    _fields_ = [
        ("site", Site),
        ("is_simdgroup", C.c_int),
        ("flags", C.c_int),
        ("hits", C.c_uint64),
    ]


_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "mh_reset": (None, []),
    "mh_options": (
        None,
        [
            C.c_int,
            C.c_uint32,
            C.c_uint32,
            C.c_uint64,
            C.c_int,
            C.c_int,
            C.c_int,
            C.c_double,
        ],
    ),
    "mh_create_buffer": (C.c_int, [C.c_uint64, C.c_char_p, C.c_int, C.c_int]),
    "mh_buffer_data": (C.c_void_p, [C.c_int]),
    "mh_unbind_all": (None, []),
    "mh_bind": (None, [C.c_int, C.c_int, C.c_uint64, C.c_int]),
    "mh_set_threadgroup_argument": (None, [C.c_int, C.c_uint64]),
    "mh_undefined_bytes": (C.c_uint64, [C.c_int, C.POINTER(C.c_uint64)]),
    "mh_clear_constants": (None, []),
    "mh_set_constant": (None, [C.c_int, C.c_char_p, C.c_int]),
    "mh_clear_unset_constants": (None, []),
    "mh_set_mutation": (None, [C.c_char_p, C.c_int, C.c_int, C.c_int, C.c_int]),
    "mh_launch": (
        C.c_int,
        [C.c_void_p, C.POINTER(C.c_uint32), C.POINTER(C.c_uint32)],
    ),
    "mh_num_reports": (C.c_size_t, []),
    "mh_reports": (C.POINTER(RawReport), []),
    "mh_counters": (C.POINTER(RawCounters), []),
    "mh_num_barrier_sites": (C.c_size_t, []),
    "mh_barrier_sites": (C.POINTER(RawBarrierSite), []),
}


def _built() -> Path:
    tools = toolchain()
    files = sorted((PACKAGE / "runtime").iterdir())
    flags = [*FLAGS, *tools.architecture_flags()]
    key = digest(*(f.read_bytes() for f in files), flags, tools.command, tools.version)
    target = cache_directory() / f"runtime-{key}.so"
    if not target.exists():
        sources = [str(f) for f in files if f.suffix == ".cpp"]
        temporary = scratch_file(".so")
        done = tools.run([*flags, "-shared", *sources, "-ldl", "-lrt", "-o", str(temporary)])
        if done.returncode:
            temporary.unlink()
            raise CompileError(done.stderr)
        publish(temporary, target)
    return target


@functools.cache
def runtime() -> C.CDLL:
    """The loaded runtime; its symbols are global, for the kernels' shared objects to find."""
    library = C.CDLL(str(_built()), mode=C.RTLD_GLOBAL)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
