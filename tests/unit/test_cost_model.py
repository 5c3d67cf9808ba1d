"""The cost model is arithmetic on counts."""

from benchmarks.metal_cost_model import CHIPS, cycles, predictions

COUNTS = {
    "mma": 105,
    "threadgroup_read": 6400,
    "threadgroup_write": 0,
    "device_read": 320,
    "device_write": 0,
}


def test_bounds_are_the_largest_term_and_the_sum():
    assert cycles(COUNTS) == (420.0, 420.0 + 100.0 + 10.0)
    assert cycles({**COUNTS, "mma": 1})[0] == 100.0  # threadgroup memory binds


def test_predictions_scale_with_cores_and_clock():
    (row, *_) = predictions({"gated_delta": {"ours": COUNTS}, "attention_d256": {}})
    units = 2048 * 32
    for chip in CHIPS:
        low = 1e3 * units * 420 / (chip.tflops * 1e12 / 256)  # cores cancel against the clock
        assert abs(row[chip.name][0] - low) < 1e-9 * low


def test_kernels_without_matrix_products_are_left_out():
    counts = {"gated_delta": {"mlx_seq": {**COUNTS, "mma": 0}}, "attention_d256": {}}
    assert predictions(counts) == []
