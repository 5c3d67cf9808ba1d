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
    "merge_states-three": lambda: plans.merge_states("bfloat16", 3, 7, 4, 64),
    "rope-mrope": lambda: plans.rope(
        "bfloat16", 9, 5, 80, [1.0, 0.1, 0.01], [0, 1, 2], traditional=True
    ),
    "rope-empty": lambda: plans.rope("float32", 0, 5, 64, [1.0], [0]),
    "gated_delta_gates-bounded": lambda: plans.gated_delta_gates(
        "bfloat16", 9, 48, lower_bound=-5.0
    ),
    "gated_delta-pooled": lambda: plans.gated_delta(
        dtype="bfloat16",
        tokens=150,
        num_k_heads=1,
        num_v_heads=2,
        head_k_dim=128,
        head_v_dim=128,
        scale=0.5,
        cu_seqlens=[0, 3, 120, 150],
        pooled=True,
        state_indices=[4, 0, 2],
        num_slots=5,
        checkpoint_every=32,
    ),
    # Two prompts' worth of segments through one scratch: written anew while the last one is read.
    "gated_delta-segments": lambda: plans.gated_delta(
        dtype="float32",
        batch=2,
        tokens=100,
        num_k_heads=2,
        num_v_heads=4,
        head_k_dim=64,
        head_v_dim=96,
        scale=1.0,
        mask=True,
        initial_state=True,
        scratch_bytes=16_000,
    ),
    "gated_delta-step": lambda: plans.gated_delta(
        dtype="float16",
        batch=3,
        tokens=1,
        num_k_heads=1,
        num_v_heads=1,
        head_k_dim=64,
        head_v_dim=64,
        scale=1.0,
        qk_l2norm=True,
    ),
    "paged_attention-prefill": lambda: plans.paged_attention(
        **attention(k_format="bf16", v_format="bf16"), sinks=True, window=40, return_lse=True
    ),
    "paged_attention-gathered": lambda: plans.paged_attention(
        **attention(k_format="q8_0", v_format="bf16"), gathered_bytes=1 << 16
    ),
    "paged_attention-decode": lambda: plans.paged_attention(
        **{**attention(k_format="bf16", v_format="bf16"), "cu_seqlens_q": [0, 1, 3]}, softcap=20.0
    ),
}


def attention(**formats):
    """Two sequences of 200 and 90 keys over two slabs of pages."""
    return {
        "dtype": "bfloat16",
        "num_q_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "page_size": 16,
        "slab_pages": [12, 12],
        "block_table": [[*range(0, 24, 2), 1], [*range(3, 15, 2)] + [-1] * 7],
        "seq_lens": [200, 90],
        "cu_seqlens_q": [0, 30, 100],
        "scale": 0.125,
        **formats,
    }
