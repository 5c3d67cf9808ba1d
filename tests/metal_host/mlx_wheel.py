"""MLX's own Metal kernels, from the wheel that its users install on a Mac."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from .toolchain import cache_directory

VERSION = "0.32.4"
PLATFORM = "macosx_14_0_arm64"


@functools.cache
def mlx_include(version: str = VERSION) -> Path:
    """The include directory of the macOS mlx-metal wheel, downloaded by pip on first use.

    Nothing of it is committed; the headers stay in the cache directory.

    Raises:
      RuntimeError: pip could not download the wheel; the message is pip's.
    """
    target = cache_directory() / f"mlx-metal-{version}" / "include"
    if target.is_dir():
        return target
    with tempfile.TemporaryDirectory(dir=cache_directory()) as temporary:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
                *("--only-binary=:all:", "--platform", PLATFORM, "--python-version", "3.11"),
                *("--dest", temporary, f"mlx-metal=={version}"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"mlx-metal {version} for {PLATFORM}: {done.stderr}")
        (wheel,) = Path(temporary).glob("*.whl")
        unpacked = Path(temporary) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            names = [
                n for n in archive.namelist() if n.startswith("mlx/include/mlx/backend/metal/")
            ]
            archive.extractall(unpacked, names)
        target.parent.mkdir(exist_ok=True)
        try:
            os.replace(unpacked / "mlx" / "include", target)
        except OSError:  # another process was first
            if not target.is_dir():
                raise
    return target


# What MLX puts before every kernel that it compiles just in time.
UTILS = '#include "mlx/backend/metal/kernels/utils.h"\n'
