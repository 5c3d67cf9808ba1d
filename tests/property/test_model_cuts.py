"""A prompt cut anywhere, forked anywhere: the same logits, and the same bits for the same cuts."""

from __future__ import annotations

import copy
import functools
import itertools

import mlx.core as mx
import mlx.nn as nn
import pytest
from chunkdelta.models.mlx_lm import accelerate
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.integration.tiny_models import build, prompt

LENGTH = 120


@functools.cache
def model(name: str) -> nn.Module:
    return accelerate(build(name))


def run(name: str, cuts: list[int], cache=None, start: int = 0) -> mx.array:
    cache = model(name).make_cache() if cache is None else cache
    edges = [start, *(c for c in cuts if c > start), LENGTH]
    tokens = prompt(LENGTH, seed=9)
    return mx.concatenate(
        [model(name)(tokens[:, a:b], cache=cache) for a, b in itertools.pairwise(edges)],
        axis=1,
    )


@functools.cache
def want(name: str) -> mx.array:
    plain = build(name)
    logits = plain(prompt(LENGTH, seed=9), cache=plain.make_cache())
    mx.eval(logits)
    return logits


@pytest.mark.parametrize("name", ["qwen3_5", "olmo_hybrid"])
@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(1, LENGTH - 1), max_size=6, unique=True).map(sorted))
def test_any_cuts(name: str, cuts: list[int]):
    got = run(name, cuts)
    error = mx.linalg.norm(got - want(name), axis=-1) / mx.linalg.norm(want(name), axis=-1)
    assert error.max().item() <= 1e-5
    assert mx.array_equal(run(name, cuts), got)


@pytest.mark.parametrize("name", ["qwen3_5", "olmo_hybrid"])
@settings(max_examples=10, deadline=None)
@given(
    at=st.integers(1, LENGTH - 1),
    others=st.lists(st.integers(0, 127), min_size=1, max_size=20),
)
def test_forks_do_not_see_each_other(name: str, at: int, others: list[int]):
    """Two forks of a prefix go different ways, in turns; the original goes on as if alone."""
    cache = model(name).make_cache()
    model(name)(prompt(LENGTH, seed=9)[:, :at], cache=cache)
    forks = [copy.deepcopy(cache) for _ in range(2)]
    model(name)(mx.array([others]), cache=forks[0])
    got = run(name, [], cache=forks[1], start=at)
    model(name)(mx.array([others]), cache=forks[0])
    again = run(name, [], cache=cache, start=at)
    assert mx.array_equal(got, again)
    assert mx.array_equal(got, run(name, [at])[:, at:])
