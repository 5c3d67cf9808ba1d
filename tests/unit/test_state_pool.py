"""StatePool under lazy graphs: every interleaving is right or refused."""

import copy
import pickle
import threading

import chunkdelta
import mlx.core as mx
import numpy as np
import pytest
from chunkdelta.testing.gated_delta_strategies import GatedDeltaCall

SHAPE = (2, 8, 8)


def make(slots=3):
    return chunkdelta.StatePool(slots, *SHAPE)


def full(value):
    return mx.full(SHAPE, float(value))


def add_row(pool, slot, seed=0, tokens=1):
    """One call of the op in the slot."""
    arguments = GatedDeltaCall(
        tokens=tokens, ratio=2, head_k_dim=8, head_v_dim=8, seed=seed
    ).arguments()
    return chunkdelta.chunk_gated_delta_rule(**arguments, state_pool=pool, state_indices=[slot])[0]


def test_a_new_pool_holds_zeros():
    assert all(mx.all(make().read(slot) == 0).item() for slot in range(3))


def test_pairs_of_write_and_read_in_one_eval():
    pool = make()
    reads = []
    for value in range(1, 9):
        pool.write(value % 3, full(value))
        reads.append(pool.read(value % 3))
    mx.eval(reads)
    assert [r[0, 0, 0].item() for r in reads] == list(range(1, 9))


def test_the_same_in_reverse_order_of_evaluation():
    pool = make()
    reads = []
    for value in range(1, 9):
        pool.write(0, full(value))
        reads.append(pool.read(0))
    assert [r[0, 0, 0].item() for r in reversed(reads)] == list(range(8, 0, -1))


@pytest.mark.parametrize("tokens", [1, 20])
def test_calls_in_one_eval_follow_each_other(tokens):
    pool, other = make(), make()
    lazy = [add_row(pool, 1, seed, tokens) for seed in range(5)]
    lazy.append(pool.read(1))
    mx.eval(lazy)
    eager = []
    for seed in range(5):
        eager.append(add_row(other, 1, seed, tokens))
        mx.eval(eager[-1])
    eager.append(other.read(1))
    assert all(mx.array_equal(a, b).item() for a, b in zip(lazy, eager, strict=True))


def test_a_read_comes_before_a_later_call():
    pool = make()
    pool.write(0, full(1))
    early = pool.read(0)
    add_row(pool, 0, tokens=20)
    mx.eval(pool.arrays)
    assert mx.all(early == 1).item()


def test_a_call_whose_output_is_dropped_still_counts():
    pool, other = make(), make()
    for p in (pool, other):
        o = add_row(p, 2)
        if p is other:
            mx.eval(o)
        del o
    assert mx.array_equal(pool.read(2), other.read(2)).item()


def test_reads_are_copies_of_the_moment():
    pool = make()
    pool.write(0, full(5))
    state = pool.read(0)
    mx.eval(state)
    pool.reset(0)
    assert mx.all(pool.read(0) == 0).item()
    assert mx.all(state == 5).item()


def test_writes_take_any_strides():
    state = mx.arange(128, dtype=mx.float32).reshape(2, 8, 8)
    pool = make()
    pool.write(1, state.swapaxes(1, 2))
    assert mx.array_equal(pool.read(1), state.swapaxes(1, 2)).item()


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: mx.compile(f)(mx.ones(1)),
        lambda f: mx.grad(lambda x: f(x).sum())(mx.ones(1)),
        lambda f: mx.vmap(f)(mx.ones((2, 1))),
    ],
    ids=["compile", "grad", "vmap"],
)
@pytest.mark.parametrize("what", ["call", "read", "write", "make"])
def test_transformations_are_refused(transform, what):
    pool = make()

    def f(x):
        if what == "call":
            return add_row(pool, 0) * x
        if what == "read":
            return pool.read(0) * x
        if what == "write":
            pool.write(0, full(7) * x)
            return x
        make()
        return x

    with pytest.raises(ValueError, match=r"expected a call outside mx\.compile"):
        transform(f)
    assert pool.generation == 0
    assert mx.all(pool.read(0) == 0).item()


def test_copies_are_refused():
    pool = make()
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"\[StatePool\] expected the pool itself"):
            attempt(pool)


def test_stale_handles_are_refused():
    pool = make()
    frozen = pool.frozen()
    assert mx.all(frozen.read(0) == 0).item()
    pool.write(0, full(1))
    with pytest.raises(ValueError, match=r"expected the pool at generation 0.*generation 1"):
        frozen.read(0)


def in_thread(work):
    result = []

    def target():
        try:
            with mx.stream(mx.new_stream(mx.cpu)):
                result.append(work())
        except ValueError as error:
            result.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    return result[0]


def test_a_second_thread_is_refused_until_the_first_has_evaluated():
    pool = make()
    pool.write(0, full(3))
    error = in_thread(lambda: pool.read(0))
    assert isinstance(error, ValueError)
    assert "expected writes of other threads to be evaluated" in str(error)
    mx.eval(pool.arrays)

    def work():
        value = pool.read(0)[0, 0, 0].item()
        pool.write(0, full(4))
        mx.eval(pool.arrays)
        return value

    assert in_thread(work) == 3
    assert pool.read(0)[0, 0, 0].item() == 4


def test_threads_with_slots_of_their_own():
    """Whatever is not refused is right."""
    pool = make(4)
    lock, failures = threading.Lock(), []

    def target(slot):
        try:
            with mx.stream(mx.new_stream(mx.cpu)):
                for value in range(25):
                    with lock:  # one step of a server: built and evaluated by one thread
                        pool.write(slot, full(100 * slot + value))
                        state = pool.read(slot)
                        mx.eval(state)
                    if state[0, 0, 0].item() != 100 * slot + value:
                        failures.append((slot, value))
        except ValueError as error:
            failures.append(error)

    threads = [threading.Thread(target=target, args=(slot,)) for slot in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_reads_pin_no_memory():
    pool = chunkdelta.StatePool(1, 16, 128, 128)
    mx.eval(pool.arrays)
    before = mx.get_active_memory()
    for _ in range(100):
        mx.eval(pool.read(0))
    assert mx.get_active_memory() - before < pool.nbytes


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: chunkdelta.StatePool(0, 1, 8, 8),
            r"\[StatePool\] expected num_slots >= 1; got 0",
        ),
        (lambda: chunkdelta.StatePool(1, 0, 8, 8), r"expected num_v_heads >= 1; got 0"),
        (lambda: chunkdelta.StatePool(1, 1, 6, 8), r"head_v_dim a multiple of 4 in 4..256; got 6"),
        (lambda: chunkdelta.StatePool(1, 1, 8, 260), r"head_k_dim a multiple of 4.*; got 260"),
        (
            lambda: make().read(3),
            r"\[StatePool\.read\] expected a slot in 0\.\.2; got 3",
        ),
        (lambda: make().write(-1, full(0)), r"expected a slot in 0\.\.2; got -1"),
        (lambda: make().reset(5), r"expected a slot in 0\.\.2; got 5"),
        (
            lambda: make().write(0, mx.zeros((2, 8))),
            r"expected state float32 \(2, 8, 8\); got .*float32 \(2, 8\)",
        ),
        (
            lambda: make().write(0, mx.zeros(SHAPE, mx.float16)),
            r"expected state float32 \(2, 8, 8\); got .*float16",
        ),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_refused_call_changes_nothing():
    pool = make()
    pool.write(0, full(2))
    with pytest.raises(ValueError, match="state_indices"):
        add_row(pool, 3)
    with pytest.raises(ValueError, match="state pool"):
        chunkdelta.chunk_gated_delta_rule(
            **GatedDeltaCall(head_k_dim=16).arguments(), state_pool=pool, state_indices=[0]
        )
    assert pool.generation == 1
    np.testing.assert_array_equal(np.array(pool.read(0)), 2)
