"""eval_gpu of every op: its arrays are those of its plan, and the result is the CPU op's.

The selftest's cases, which a Mac runs on its GPU, run here through the same plans on the host.
"""

import pytest
from chunkdelta import selftest
from chunkdelta.selftest_cases import cases

from tests.metal_host.ops_on_host import ops_on_host

CASES = [pytest.param(c, id=f"{c.op}-{c.dtype}-{c.shape}".replace(" ", "-")) for c in cases()]


@pytest.mark.parametrize("case", CASES)
def test_selftest_case_through_the_metal_kernels(case):
    with ops_on_host() as ran:
        result = selftest.check(case)
    assert result.ok, result
    assert ran, "no kernel ran"
