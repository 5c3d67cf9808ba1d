"""Resident memory of this process: now, and at most since a reset (Linux)."""

from __future__ import annotations

from pathlib import Path


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {key} in /proc/self/status")


def resident_bytes() -> int:
    """Bytes resident now."""
    return _status("VmRSS")


def resident_high_water() -> int:
    """Most bytes that were resident since the last reset."""
    return _status("VmHWM")


def reset_high_water() -> None:
    """Start the high-water mark anew at what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
