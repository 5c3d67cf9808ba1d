"""The environment that this build of chunkdelta expects, and what it found."""

from __future__ import annotations

import importlib.metadata


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
