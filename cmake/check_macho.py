"""Checks that a cross-linked macOS extension will find its symbols when it is imported.

A Python extension links with ``-undefined dynamic_lookup``, so a name that libmlx does not export
(it hides all that is not MLX_API), or exports with another signature, is left to the loader and is
only missed on a user's Mac. Every such name must belong to CPython or the Objective-C runtime.

    python cmake/check_macho.py _ext.so libmlx.dylib
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass
from pathlib import Path

# <mach-o/loader.h>, <mach-o/nlist.h>
_MAGIC_64 = 0xFEEDFACF
_CPU_TYPE_ARM64 = 0x0100000C
_LOAD_DYLIB_COMMANDS = {0xC, 0x80000018, 0x8000001F}  # LC_LOAD_DYLIB, _WEAK_DYLIB, REEXPORT
_LC_SYMTAB = 0x2
_N_STAB, _N_PEXT, _N_TYPE, _N_EXT, _N_UNDF = 0xE0, 0x10, 0x0E, 0x01, 0x00
# Library ordinals that name no library: the image itself, the executable, flat lookup.
_UNBOUND_ORDINALS = {0x00, 0xFF, 0xFE}
_FROM_THE_HOST_PROCESS = ("_Py", "__Py", "_objc_", "_sel_", "_class_", "_OBJC_CLASS_$_NS")


@dataclass(frozen=True)
class Image:
    """The external symbols of a 64-bit arm64 Mach-O file."""

    libraries: list[str]
    defined: set[str]
    undefined: dict[str, int]  # library ordinal by name

    @classmethod
    def read(cls, path: Path) -> Image:
        data = path.read_bytes()
        magic, cpu, _, _, commands, *_ = struct.unpack_from("<8I", data)
        if magic != _MAGIC_64 or cpu != _CPU_TYPE_ARM64:
            raise ValueError(f"{path} is not a 64-bit arm64 Mach-O file")
        image = cls([], set(), {})
        at = 32
        for _ in range(commands):
            command, size = struct.unpack_from("<2I", data, at)
            if command in _LOAD_DYLIB_COMMANDS:
                (name,) = struct.unpack_from("<I", data, at + 8)
                image.libraries.append(_string(data, at + name))
            elif command == _LC_SYMTAB:
                symbols, count, strings, _ = struct.unpack_from("<4I", data, at + 8)
                image._read_symbols(data, symbols, count, strings)
            at += size
        return image

    def _read_symbols(self, data: bytes, at: int, count: int, strings: int) -> None:
        for name, kind, _, description, _ in struct.iter_unpack(
            "<IBBHQ", data[at : at + 16 * count]
        ):
            if kind & _N_STAB or kind & _N_PEXT or not kind & _N_EXT:
                continue
            text = _string(data, strings + name)
            if kind & _N_TYPE == _N_UNDF:
                self.undefined[text] = description >> 8 & 0xFF
            else:
                self.defined.add(text)


def _string(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def check(extension: Path, libmlx: Path) -> tuple[int, int, list[str]]:
    """Symbols taken from libmlx, those left to the loader, and of these the ones nobody provides.

    Raises:
        ValueError: not arm64 Mach-O files, or the extension does not link libmlx.
    """
    image, exported = Image.read(extension), Image.read(libmlx).defined
    if not any(library.endswith("/libmlx.dylib") for library in image.libraries):
        raise ValueError(f"{extension} links {image.libraries}, not libmlx.dylib")
    from_mlx = image.undefined.keys() & exported
    unbound = [
        name
        for name, ordinal in image.undefined.items()
        if name not in exported and ordinal in _UNBOUND_ORDINALS
    ]
    missing = sorted(name for name in unbound if not name.startswith(_FROM_THE_HOST_PROCESS))
    return len(from_mlx), len(unbound), missing


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    from_mlx, unbound, missing = check(Path(sys.argv[1]), Path(sys.argv[2]))
    print(f"{from_mlx} symbols from libmlx, {unbound} left to the loader")
    if missing:
        sys.exit("not exported by libmlx or anything else linked:\n  " + "\n  ".join(missing))


if __name__ == "__main__":
    main()
