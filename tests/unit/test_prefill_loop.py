"""The loop on a model of its own, without kernels: what it calls, with what, and when."""

import mlx.core as mx
import numpy as np
import pytest
from chunkdelta.loop.prefill import PrefillCancelled, PrefillModel, prefill
from chunkdelta.loop.shapes import AttentionShape, LayerShape, MlpShape, ModelShape

HIDDEN, VOCAB = 8, 32


class Cache:
    """Running sum of the hidden states, and the number of tokens seen."""

    def __init__(self, offset=0):
        self.offset = offset
        self.state = mx.zeros((HIDDEN,))


class Model:
    """Hidden states are embeddings plus the mean of all before: order and cuts show."""

    def __init__(self):
        self.table = mx.random.normal((VOCAB, HIDDEN), key=mx.random.key(1))
        self.calls = []
        self.head_rows = []

    def body(self, inputs, cache, *, positions=None):
        self.calls.append((inputs, positions))
        x = self.table[inputs] if inputs.ndim == 2 else inputs
        sums = cache[0].state + mx.cumsum(x, axis=1)
        cache[0].state = sums[-1, -1]
        cache[0].offset += x.shape[1]
        return sums

    def head(self, hidden):
        self.head_rows.append(hidden.shape[1])
        return hidden @ self.table.T

    def memory_shape(self):
        layer = LayerShape(AttentionShape(2, 1, 4), MlpShape(16))
        return ModelShape(HIDDEN, VOCAB, (layer,), weight_bytes=self.table.nbytes, dtype_bytes=4)


TOKENS = list(range(23))


def test_the_protocol_is_checked():
    assert isinstance(Model(), PrefillModel)
    with pytest.raises(
        ValueError, match=r"\[prefill\] expected a model with body, head.*got object"
    ):
        prefill(object(), TOKENS, [Cache()])


@pytest.mark.parametrize("chunk_size", [1, 7, 22, 23, 64])
@pytest.mark.parametrize("as_array", [list, np.array, mx.array])
def test_chunks_change_nothing(chunk_size, as_array):
    model, cache = Model(), [Cache()]
    logits = prefill(model, as_array(TOKENS), cache, chunk_size=chunk_size)
    assert logits.shape == (1, VOCAB)
    assert cache[0].offset == 23
    reference = mx.cumsum(model.table[mx.array(TOKENS)], axis=0)[-1] @ model.table.T
    np.testing.assert_allclose(logits[0], reference, rtol=1e-5, atol=1e-5)
    assert model.head_rows == [1]  # the head saw one token in all
    lengths = [inputs.shape[1] for inputs, _ in model.calls]
    assert sum(lengths) == 23
    assert max(lengths) <= chunk_size
    np.testing.assert_array_equal(
        np.concatenate([np.array(i) for i, _ in model.calls], 1)[0], TOKENS
    )


def test_logits_of_all_tokens_or_none():
    model = Model()
    every = prefill(model, TOKENS, [Cache()], chunk_size=10, logits="all")
    assert every.shape == (1, 23, VOCAB)
    last = prefill(Model(), TOKENS, [Cache()], chunk_size=10)
    np.testing.assert_array_equal(every[:, -1], last)
    model.head_rows.clear()
    assert prefill(model, TOKENS, [Cache()], chunk_size=10, logits="none") is None
    assert model.head_rows == []


def test_continues_from_the_cache_and_cuts_at_positions_of_the_context():
    model, cache = Model(), [Cache()]
    prefill(model, TOKENS[:9], cache, chunk_size=16)
    logits = prefill(model, TOKENS[9:], cache, chunk_size=16, cut_points=[4, 16, 20])
    assert [i.shape[1] for i, _ in model.calls] == [9, 7, 4, 3]
    np.testing.assert_allclose(logits, prefill(Model(), TOKENS, [Cache()]), rtol=1e-5)


def test_offsets_may_be_arrays():
    model, cache = Model(), [Cache(offset=mx.array([4, 6])), Cache(offset=None)]
    prefill(model, np.ones((2, 5), int), cache, cut_points=[8])
    assert [i.shape for i, _ in model.calls] == [(2, 2), (2, 3)]


def test_embeddings_and_positions_are_sliced_with_the_chunks():
    model, cache = Model(), [Cache()]
    embeddings = model.table[mx.array(TOKENS)]
    positions = mx.stack([mx.arange(23) + i for i in range(3)])
    logits = prefill(model, embeddings, cache, chunk_size=8, positions=positions)
    seen = [np.array(p) for _, p in model.calls]
    assert [p.shape for p in seen] == [(3, 8), (3, 8), (3, 7)]
    np.testing.assert_array_equal(np.concatenate(seen, axis=1), positions)
    np.testing.assert_allclose(logits, prefill(Model(), TOKENS, [Cache()]), rtol=1e-5)


def test_progress_counts_tokens():
    seen = []
    prefill(Model(), TOKENS, [Cache()], chunk_size=8, progress=lambda *a: seen.append(a))
    assert seen == [(0, 23), (8, 23), (16, 23), (23, 23)]


def test_cancelled_between_chunks_and_taken_up_again():
    model, cache = Model(), [Cache()]
    with pytest.raises(PrefillCancelled, match="after 16 of 23 tokens") as stop:
        prefill(model, TOKENS, cache, chunk_size=8, should_stop=lambda: len(model.calls) == 2)
    assert (stop.value.done, stop.value.total) == (16, 23)
    assert cache[0].offset == 16
    logits = prefill(model, TOKENS[stop.value.done :], cache, chunk_size=8)
    np.testing.assert_array_equal(logits, prefill(Model(), TOKENS, [Cache()], chunk_size=8))


@pytest.mark.parametrize("fails", ["body", "progress"])
def test_limits_survive_what_goes_wrong_inside(fails):
    model = Model()

    def wrong(*args, **kwargs):
        raise RuntimeError("wrong")

    progress = None
    if fails == "body":
        model.body = wrong
    else:
        progress = lambda done, total: done and wrong()  # noqa: E731
    before = mx.set_memory_limit(1 << 40)
    mx.set_memory_limit(before)
    with pytest.raises(RuntimeError, match="wrong"):
        prefill(model, TOKENS, [Cache()], progress=progress)
    after = mx.set_memory_limit(1 << 40)
    mx.set_memory_limit(after)
    assert after == before


@pytest.mark.parametrize(
    ("inputs", "arguments", "message"),
    [
        pytest.param([], {}, r"token ids .* none empty; got shape \(1, 0\)", id="empty"),
        pytest.param(np.zeros((1, 2, 3), int), {}, r"got shape \(1, 2, 3\)", id="rank-3-ids"),
        pytest.param(np.zeros(3), {}, "integer token ids.*got float64", id="float-ids"),
        pytest.param(mx.zeros((3,)), {}, r"embeddings .*got shape \(3,\)", id="rank-1-embeddings"),
        pytest.param([1], {"logits": "first"}, "last, all or none; got 'first'", id="logits"),
        pytest.param([1], {"chunk_size": 0}, "chunk_size >= 1", id="chunk-size"),
        pytest.param(
            [1, 2],
            {"positions": mx.zeros((3, 5))},
            r"positions of 2 tokens.*\(3, 5\)",
            id="positions",
        ),
    ],
)
def test_refuses_before_anything_is_computed(inputs, arguments, message):
    model = Model()
    with pytest.raises(ValueError, match=message):
        prefill(model, inputs, [Cache()], **arguments)
    assert model.calls == []
