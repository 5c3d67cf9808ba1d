# The C++ extension. Its functions are internal: the typed, documented surface is chunkdelta.ops.
from typing import Any

def __getattr__(name: str) -> Any: ...
