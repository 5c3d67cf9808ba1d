"""Metal kernels on the host: compiles real .metal sources for the CPU, runs and checks them.

Nothing here needs a Mac. ``pip install ziglang pyelftools numpy`` is enough; a clang of the system is
used where there is one (see toolchain.py for the environment variables). What this proves and what
it does not: docs/concepts/metal-on-host.md.

Kernels on arrays::

    library = Library(Path("metal/gated_delta/chunk.metal"), include=[METAL_ROOT], mode="check",
                      constants={0: True}, only="gated_delta_prep_f16")
    result = library.run("gated_delta_prep_f16", (chunks, heads, 1), (128, 1, 1),
                         {0: q, 1: k, 4: a, 7: params_bytes}, outputs=[4])
    result.counters.mma, result.counters.device_bytes_read, result.barrier_sites

* The grid is in threadgroups, as in a launch plan (``grid_in_threads=True``: in threads).
* Buffers are read-only unless named: ``outputs`` start undefined and must be written completely,
  ``partial_outputs`` start undefined, ``inout`` are read and written. Results are written into the
  arrays given. bfloat16: ``ml_dtypes.bfloat16`` or uint16. Params structs are ``bytes``.
* A broken rule raises MetalError, each line with file:line; ``raise_errors=False`` returns the
  reports in ``result.reports`` instead.
* ``Options(order=seed, poison=byte, lockstep=..., cpu_seconds=...)`` changes how a launch runs:
  order 0 forward, 1 reverse, any other number a shuffle of threadgroups and threads.
* mode "check" finds data races (per memory class and barrier flags), accesses out of bounds,
  uninitialised reads, unwritten outputs, writes to read-only buffers, divergence at barriers and
  simdgroup functions, matrix functions in partial simdgroups, private memory of other threads,
  undefined behaviour, unset function constants, broken limits and hangs. mode "fast" is for numbers
  and finds less (Library tells).

Launch plans::

    result = execute_plan(plan, {"q": q, "k": k, "o": np.empty_like(v)}, outputs=["o"])
    result.arrays["o"], result.counters, result.launches[0].counters

Mutants, switched at run time by site (no recompile)::

    for mutant in mutants(result.barrier_sites):
        reports = library.run(..., mutation=mutant, raise_errors=False).reports

``typecheck(path, include=[METAL_ROOT])`` compiles with real address spaces and lists what Apple's compiler
would refuse; ``flatten(path, include)`` makes the one text that is compiled just in time on a Mac.
"""

from .flatten import METAL_ROOT, flatten, metal_sources
from .memory import Options
from .mutants import mutants
from .plan import PlanResult, execute_plan
from .report import BarrierSite, Counters, MetalError, Report
from .run import LaunchResult, Library, Mutation
from .scan import RewriteError
from .toolchain import CompileError
from .typecheck import typecheck

__all__ = [
    "METAL_ROOT",
    "BarrierSite",
    "CompileError",
    "Counters",
    "LaunchResult",
    "Library",
    "MetalError",
    "Mutation",
    "Options",
    "PlanResult",
    "Report",
    "RewriteError",
    "execute_plan",
    "flatten",
    "metal_sources",
    "mutants",
    "typecheck",
]
