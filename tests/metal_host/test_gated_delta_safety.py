"""The gated delta kernels in check mode: races, bounds, undefined memory, far addresses, mutants."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from tests.metal_host import METAL_ROOT, MetalError, Options, mutants, typecheck
from tests.metal_host.gated_delta_case import DTYPES, RAGGED, Case, make
from tests.metal_host.memory import Memory
from tests.metal_host.native import runtime
from tests.metal_host.plan import plan_library

# ------------------------------------------------------------------ addresses


class FarMemory(Memory):
    """Takes offsets that point before a buffer: the kernel's own index leads back into it."""

    def bind(self, index, number, offset, access):
        runtime().mh_bind(index, number, offset % 2**64, access)


@pytest.mark.parametrize("mode", ["fast", "check"])
@pytest.mark.parametrize("tokens", [1, 20])
def test_slots_beyond_32_bits(tokens, mode):
    """Slot 1,000,000 of a pool of 128 GB, of which only that slot exists."""
    case = Case(tokens=tokens, slots=(0,), num_slots=1)
    near = make(case).run()
    slot = 1_000_000
    call = make(replace(case, slots=(slot,), num_slots=slot + 1), allocate_pool=False)
    call.arrays["state"] = call.arrays["initial_state"]
    plan = call.plan()
    memory = FarMemory(mode == "check", Options())
    numbers = {role: memory.add(a, role) for role, a in call.arrays.items()}
    for scratch in plan.scratch:
        numbers[scratch.role] = memory.allocate(scratch.bytes, scratch.role, defined=False)
    for data in plan.host_data:
        numbers[data.role] = memory.add_bytes(data.bytes, data.role)
    for launch in plan.launches:
        bindings = [(p.index, memory.add_bytes(p.bytes, "params"), 0, 1) for p in launch.params]
        for b in launch.buffers:
            offset = -slot * call.arrays["state"].nbytes if b.role == "state" else 0
            bindings.append((b.index, numbers[b.role], offset, 3))
        library = plan_library(METAL_ROOT, launch.source, launch.kernel, mode, False)
        result = library.launch(
            memory,
            launch.kernel,
            launch.grid,
            launch.threadgroup,
            bindings,
            constants={c.index: c.value for c in launch.constants},
        )
        assert not result.reports
    o, state = near.o_bits.copy(), near.state.copy()
    memory.read_into(numbers["o"], o)
    memory.read_into(numbers["state"], state)
    assert o.tobytes() == near.o_bits.tobytes()
    assert state.tobytes() == near.state.tobytes()


# ------------------------------------------------------------------ safety

CHECKED = [
    Case(tokens=70, value_heads=5),
    Case(tokens=33, key_heads=2, value_heads=2),
    Case(tokens=40, value_heads=4, cores=1),
    Case(tokens=20, key_dim=64, value_dim=96),
    Case(tokens=20, key_dim=192, value_dim=128),
    Case(tokens=20, key_dim=256, value_dim=64, l2norm=True),
    Case(tokens=20, key_dim=80, value_dim=72),
    Case(tokens=5, value_heads=3, value_dim=100),
    Case(tokens=77, cu_seqlens=RAGGED, every=7, initial=False),
    Case(tokens=90, cu_seqlens=(0, 40, 41, 90), slots=(3, 0, 5), num_slots=7, every=7),
    Case(tokens=40, batch=2, mask=0.7, l2norm=True),
    Case(tokens=9, batch=2, mask=0.7, l2norm=True, slots=(4, 1), num_slots=6, every=4),
    Case(tokens=40, padding=12, scratch_bytes=2 * 2 * 1744),
    Case(tokens=40, padding=1),
    Case(tokens=9, apart=2),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CHECKED, ids=str)
def test_check_mode_has_nothing_to_report(case, dtype):
    """And no bit depends on the order of threads or on what undefined memory holds."""
    call = make(replace(case, dtype=dtype))
    forward = call.run("check", options=Options(order=0, poison=0xFF))
    reverse = call.run("check", options=Options(order=1, poison=0x3F))
    assert forward.bits() == reverse.bits()
    assert max(forward.errors()) <= 3e-3


@pytest.mark.parametrize(
    "case",
    [
        Case(tokens=70, value_heads=5, dtype="float16"),
        # K and Q share a buffer, one after the other; prep stages the head dim in two parts.
        Case(tokens=40, value_heads=5, key_dim=256, value_dim=64, l2norm=True),
    ],
    ids=str,
)
def test_every_barrier_is_needed(case):
    call = make(case)
    silent = []
    for mutant in mutants(call.run("check").done.barrier_sites):
        caught = any(
            call.run(
                "check", mutation=mutant, options=Options(order=order), raise_errors=False
            ).done.reports
            for order in (0, 1)
        )
        if not caught:
            silent.append(str(mutant))
    assert not silent


EDITS = [  # file, what it says, what a mistake would say, a case that must notice
    ("prep.h", "max(g[from], kLeastLogGate)", "g[from]", Case(tokens=40, gates="infinite")),
    (
        "sequential.h",
        "max(g[row * num_v_heads + v_head], kLeastLogGate)",
        "min(g[row * num_v_heads + v_head], -0.02f)",
        Case(tokens=9),
    ),
    ("prep.h", "G = two_float_add(before, G)", "G.x += before.x", Case(tokens=512, gates="rare")),
    (
        "prep.h",
        "int(lane) < rows && (!has_mask || live[lane])",
        "int(lane) < rows",
        Case(tokens=40, mask=0.5),
    ),
    ("prep.h", "row < rows && (!has_mask || live[row])", "row < rows", Case(tokens=40, mask=0.5)),
    (
        "prep.h",
        "row < rows && (!has_mask || live[row])",
        "(!has_mask || live[row])",
        Case(tokens=41, cu_seqlens=(0, 20, 41)),
    ),
    ("prep.h", "const int least = is_scores ? 0 : 1;", "const int least = 1;", Case(tokens=40)),
    (
        "prep.h",
        "f[kChunk] = scale * gamma * rq;",
        "f[kChunk] = scale * gamma;",
        Case(tokens=40, l2norm=True),
    ),
    ("prep.h", "const int k_head = tg.y;", "const int k_head = 0;", Case(tokens=40, key_heads=2)),
    (
        "scan.h",
        "v_head / params.group_size",
        "v_head % params.group_size",
        Case(tokens=40, key_heads=3, value_heads=6),
    ),
    ("scan.h", "x < head_k_dim && y < columns ? p", "y < columns ? p", Case(tokens=40, key_dim=80)),
    (
        "scan.h",
        "if (x < head_k_dim && y < columns) p",
        "if (x < head_k_dim) p",
        Case(tokens=40, value_dim=68),
    ),
    ("scan.h", "until -= live_rows;", "until -= kChunk;", Case(tokens=90, every=25)),
    (
        "scan.h",
        "checkpoint_at += num_v_heads * state_size;",
        "checkpoint_at += state_size;",
        Case(tokens=90, every=25),
    ),
    ("scan.h", "slot += num_v_heads;", "slot += 1;", Case(tokens=90)),
    ("scan.h", "sequence->state)", "sequence->initial)", Case(tokens=40, slots=(2,), num_slots=3)),
    (
        "options.h",
        "if (x + e < head_k_dim) y[e]",
        "y[e]",
        Case(tokens=40, key_dim=80),
    ),
    ("sequential.h", "has_mask && !mask[row]", "false", Case(tokens=9, mask=0.5)),
    (
        "sequential.h",
        "checkpoint_at += state_size;",
        "checkpoint_at += 1;",
        Case(tokens=9, every=2),
    ),
    (
        "sequential.h",
        "b * (value - rk * row_sum",
        "b * (value - row_sum",
        Case(tokens=9, l2norm=True),
    ),
]


@pytest.mark.parametrize(("file", "right", "wrong", "case"), EDITS, ids=lambda x: str(x)[:40])
def test_mistakes_in_the_kernels_are_noticed(file, right, wrong, case, tmp_path):
    """Each edit is a mistake that someone could make; the cases above must see it."""
    root = tmp_path / "metal"
    shutil.copytree(METAL_ROOT, root)
    path = root / "gated_delta" / file
    text = " ".join(path.read_text().split(" "))
    assert text.count(right) >= 1, f"{file} does not say {right!r} any more"
    path.write_text(text.replace(right, wrong))
    call = make(case)
    right_errors = call.run().errors()
    assert max(right_errors) <= 1e-6
    try:
        wrong_errors = call.run("check", root=root).errors()
    except MetalError:
        return
    assert any(y > 2 * x for x, y in zip(right_errors, wrong_errors, strict=True))


@pytest.mark.parametrize("name", ["chunk_f32", "chunk_f16", "chunk_bf16", "step"])
def test_sources_type_check(name):
    assert typecheck(METAL_ROOT / "gated_delta" / f"{name}.metal", include=[METAL_ROOT]) == []
