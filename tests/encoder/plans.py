"""A few plans of every op, named after their function in ``chunkdelta._ext.plans``."""

from chunkdelta._ext import plans

PLANS = {
    "append_kv-q8_0": lambda: plans.append_kv(
        "bfloat16", "q8_0", [3, -1, 17], num_kv_heads=2, head_dim=64, page_size=16, num_pages=2
    ),
    "append_kv-f16": lambda: plans.append_kv(
        "float32", "f16", range(5), num_kv_heads=3, head_dim=80, page_size=16, num_pages=1
    ),
    "copy_pages-slabs": lambda: plans.copy_pages(1024, [0, 3, 7], 1, [0, 6, 2], [4, 3, 5]),
    "causal_conv1d-ragged": lambda: plans.causal_conv1d(
        "bfloat16", 48, 4, [0, 3, 3, 70], bias=True, initial_state=True, silu=True
    ),
    "causal_conv1d-mask": lambda: plans.causal_conv1d("float32", 5, 3, [0, 33], mask=True),
    "causal_conv1d-split": lambda: plans.causal_conv1d("float16", 8192, 4, [0, 40_000]),
    "rope-mrope": lambda: plans.rope(
        "bfloat16", 9, 5, 80, [1.0, 0.1, 0.01], [0, 1, 2], traditional=True
    ),
    "rope-empty": lambda: plans.rope("float32", 0, 5, 64, [1.0], [0]),
}
