"""Device memory of one or more launches: buffers in the runtime's arena, filled and read back."""

from __future__ import annotations

import ctypes as C
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .native import runtime

READ, WRITE, READ_WRITE = 1, 2, 3


@dataclass(frozen=True)
class Options:
    """How a launch is executed.

    Attributes:
      order: 0 runs threadgroups and threads forward, 1 in reverse, any other number seeds a shuffle.
      poison: byte that fills memory whose content is undefined; 0xFF is NaN in every float type.
      max_threads: largest threadgroup, in threads.
      threadgroup_limit: largest threadgroup memory, in bytes.
      strict_simd: simdgroup functions must be reached by all lanes. Metal allows divergence for
        some of them; barriers and matrix functions are always strict.
      lockstep: every simdgroup function orders the memory of its simdgroup. Today's hardware does,
        the language does not promise it; for other people's kernels that rely on it.
      flush_denormals: float32 denormals count as zero, as the hardware may have it.
      cpu_seconds: CPU time after which a launch is reported as hanging.
    """

    order: int = 0
    poison: int = 0xFF
    max_threads: int = 1024
    threadgroup_limit: int = 32768
    strict_simd: bool = True
    lockstep: bool = False
    flush_denormals: bool = False
    cpu_seconds: float = 60.0

    def apply(self) -> None:
        """Makes these the options of the runtime's next launches."""
        runtime().mh_options(
            self.poison,
            self.order,
            self.max_threads,
            self.threadgroup_limit,
            self.strict_simd,
            self.lockstep,
            self.flush_denormals,
            self.cpu_seconds,
        )


class Memory:
    """The buffers of a launch or plan. Making one forgets those of the one before.

    Args:
      checked: track every access (check mode).
      options: gives the poison.
    """

    def __init__(self, checked: bool, options: Options):
        self._checked = checked
        self._sizes: list[int] = []
        options.apply()
        runtime().mh_reset()

    def allocate(self, size: int, name: str, defined: bool) -> int:
        """A buffer of ``size`` bytes; poisoned unless its content is to be ``defined``."""
        number: int = runtime().mh_create_buffer(size, name.encode(), self._checked, defined)
        if number < 0:
            raise MemoryError(f"metal_host: no room for {name} of {size} bytes")
        self._sizes.append(size)
        return number

    def add(self, array: npt.NDArray[np.generic], name: str, defined: bool = True) -> int:
        """A buffer for ``array``, with its content if ``defined``."""
        number = self.allocate(array.nbytes, name, defined)
        if defined and array.nbytes:
            data = np.ascontiguousarray(array)
            C.memmove(self._address(number), data.ctypes.data, data.nbytes)
        return number

    def add_bytes(self, content: bytes, name: str) -> int:
        """A buffer with the given bytes."""
        number = self.allocate(len(content), name, defined=True)
        C.memmove(self._address(number), content, len(content))
        return number

    def read_into(self, number: int, array: npt.NDArray[np.generic]) -> None:
        """Copies a buffer back into a C-contiguous array."""
        if array.nbytes:
            C.memmove(array.ctypes.data, self._address(number), array.nbytes)

    def read_bytes(self, number: int) -> bytes:
        """The buffer's content."""
        return C.string_at(self._address(number), self._sizes[number])

    def bind(self, index: int, number: int, offset: int, access: int) -> None:
        """Binds a buffer from ``offset`` on to ``[[buffer(index)]]`` of the next launch."""
        if not 0 <= offset <= self._sizes[number]:
            raise ValueError(
                f"[metal_host] expected an offset within {self._sizes[number]} bytes; got {offset}"
            )
        runtime().mh_bind(index, number, offset, access)

    def undefined(self, number: int) -> tuple[int, int]:
        """How many bytes never got defined content, and the offset of the first."""
        first = C.c_uint64()
        count: int = runtime().mh_undefined_bytes(number, C.byref(first))
        return count, first.value

    @staticmethod
    def _address(number: int) -> int:
        address: int = runtime().mh_buffer_data(number)
        return address
