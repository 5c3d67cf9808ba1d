"""A few plans of every op, named after their function in ``chunkdelta._ext.plans``."""

from chunkdelta._ext import plans

PLANS = {
    "causal_conv1d-ragged": lambda: plans.causal_conv1d(
        "bfloat16", 48, 4, [0, 3, 3, 70], bias=True, initial_state=True, silu=True
    ),
    "causal_conv1d-mask": lambda: plans.causal_conv1d("float32", 5, 3, [0, 33], mask=True),
    "causal_conv1d-split": lambda: plans.causal_conv1d("float16", 8192, 4, [0, 40_000]),
}
