"""The selftest sees what it should see: every op, a wrong number, a crash."""

import io

import chunkdelta
import mlx.core as mx
import pytest
from chunkdelta import _ext, ops, selftest, selftest_cases
from rich.console import Console

OTHER_NAMES = {  # public, but not an op of its own
    "attention_metadata",
    "slot_mapping",
}


def run(monkeypatch, *, only):
    """Exit code and text of a selftest of one op."""
    kept = [case for case in selftest.cases() if case.op == only]
    monkeypatch.setattr(selftest, "cases", lambda: iter(kept))
    out = io.StringIO()
    code = selftest.main(Console(file=out, width=200))
    return code, out.getvalue()


def test_passes_here():
    results = [selftest.check(case) for case in selftest.cases()]
    assert [r for r in results if not r.ok] == []
    assert sum(r.seconds for r in results) < 60
    assert {r.kernel for r in results} == {f"cpu {_ext.active_isa()}"}


def test_every_op_is_there():
    tested = {case.op for case in selftest.cases()} - {"copy_pages"}
    assert tested == set(ops.__all__) - OTHER_NAMES


def test_dtypes_and_formats_are_there():
    cases = list(selftest.cases())
    for op in {case.op for case in cases} - {"copy_pages"}:
        assert {case.dtype for case in cases if case.op == op} == set(selftest_cases.DTYPES), op
    formats = {case.shape.split()[-1] for case in cases if case.op == "append_kv"}
    assert formats == set(_ext.page_formats())


def test_plans_name_the_kernels(monkeypatch):
    """What the kernel column holds on a Mac: the plan of each call, made here."""
    monkeypatch.setattr(selftest.mx, "default_device", lambda: mx.Device(mx.gpu))
    for case in selftest.cases():
        if case.plan is not None:
            name = selftest._kernel(case)
            assert all(part.count("_") for part in name.split(" + ")), (case, name)


def test_a_good_run_prints_the_table_and_a_block_to_paste(monkeypatch):
    code, text = run(monkeypatch, only="rope")
    assert code == 0
    assert "traditional" in text
    assert "FAILED" not in text
    block = text[text.index("```") :]
    assert "mlx: 0.32.4" in block
    assert "device: Device(" in block
    assert "CPU kernels: " + _ext.active_isa() in block
    assert "selftest: 9 passed, 0 failed" in block


def test_a_wrong_number_fails(monkeypatch):
    right = ops.rope
    monkeypatch.setattr(ops, "rope", lambda x, *a, **k: right(x, *a, **k) * (1 + 2e-6))
    code, text = run(monkeypatch, only="rope")
    assert code == 1
    assert text.count("FAILED rope float32") == 3  # in the block; 16-bit dtypes hide it
    assert text.count("e-06, allowed 5.60e-07") == 3


def test_a_result_that_is_not_finite_fails(monkeypatch):
    right = ops.rope
    monkeypatch.setattr(ops, "rope", lambda x, *a, **k: right(x, *a, **k) / 0)
    code, text = run(monkeypatch, only="rope")
    assert code == 1
    assert text.count("error inf") == 9


def test_a_crash_is_a_failure_and_the_rest_goes_on(monkeypatch):
    def crash(x, *a, **k):
        if x.dtype == mx.float16:
            raise RuntimeError("[metal::Device] Unable to build metal library from source")
        return right(x, *a, **k)

    right = ops.rope
    monkeypatch.setattr(ops, "rope", crash)
    code, text = run(monkeypatch, only="rope")
    assert code == 1
    assert "6 passed, 3 failed" in text
    assert "RuntimeError: [metal::Device] Unable to build metal library" in text


def test_the_command_returns_the_exit_code(monkeypatch):
    from chunkdelta.cli import commands
    from click.testing import CliRunner

    kept = [case for case in selftest.cases() if case.op == "merge_states"]
    monkeypatch.setattr(selftest, "cases", lambda: iter(kept))
    assert CliRunner().invoke(commands, ["selftest"]).exit_code == 0
    monkeypatch.setattr(ops, "merge_states", lambda o, l: chunkdelta.merge_states(o + 1, l))
    assert CliRunner().invoke(commands, ["selftest"]).exit_code == 1


@pytest.mark.parametrize("field", ["op", "dtype", "shape"])
def test_cases_can_be_told_apart(field):
    cases = [(c.op, c.dtype, c.shape) for c in selftest.cases()]
    assert len(set(cases)) == len(cases)
    assert all(getattr(c, field) for c in selftest.cases())
