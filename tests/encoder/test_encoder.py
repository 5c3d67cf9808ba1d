"""The macOS encoder, compiled here against a device that writes down its calls: they are the plan's.

The stand-in is include/mlx/backend/metal; that MLX's own header has the same functions is what the
cross-link checks (tests/integration/test_cross_link.py).
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core
import pytest
from chunkdelta import _ext

from tests.build_scripts import ROOT, load
from tests.encoder.plans import PLANS

HERE = Path(__file__).parent
MLX = Path(next(iter(mlx.core.__spec__.submodule_search_locations or [mlx.core.__file__]))).parent
ACCESS = ["Read", "Write", "ReadWrite"]
METAL_TYPES = {"bool": 53, "int": 29, "uint": 33, "float": 3}
FORMATS = {"bool": "?", "int": "<i", "uint": "<I", "float": "<f"}


@pytest.fixture(scope="session")
def recorder(tmp_path_factory):
    compiler = os.environ.get("CXX") or next(
        filter(None, map(shutil.which, ("g++", "clang++"))), None
    )
    if compiler is None:
        pytest.skip("no C++ compiler of the system (ziglang's cannot link with MLX's libstdc++)")
    folder = tmp_path_factory.mktemp("encoder")
    # fmt: off
    subprocess.run(
        [sys.executable, ROOT / "cmake/flatten_metal.py", "--root", ROOT / "metal",
         "--output", folder / "metal_sources.cpp"],
        check=True,
    )
    subprocess.run(
        [*compiler.split(), "-std=c++20", "-O0", "-fPIC", "-shared", "-D_METAL_", "-Wall",
         "-I", HERE / "include", "-I", ROOT / "src", "-I", ROOT / "metal", "-I", MLX / "include",
         HERE / "record.cpp", ROOT / "src/metal/encoder.cpp", folder / "metal_sources.cpp",
         "-L", MLX / "lib", "-lmlx", f"-Wl,-rpath,{MLX / 'lib'}", "-o", folder / "record.so"],
        check=True, timeout=600,
    )
    # fmt: on
    library = ctypes.CDLL(str(folder / "record.so"))
    library.record.restype = ctypes.c_char_p
    library.text_hash.restype = ctypes.c_uint64
    return library


def access(binding) -> str:
    return getattr(binding.access, "name", binding.access)


def hexed(content: bytes) -> str:
    return "x" + content.hex()


def plan_text(plan, roles) -> list[str]:
    """The lines that record.cpp reads."""
    lines = [f"op {plan.op}"]
    lines += [f"array {role}" for role in roles]
    lines += [f"scratch {s.role} {s.bytes}" for s in plan.scratch]
    lines += [f"host_data {h.role} {hexed(h.bytes)}" for h in plan.host_data]
    for launch in plan.launches:
        sizes = " ".join(map(str, [*launch.grid, *launch.threadgroup]))
        lines.append(f"launch {launch.source} {launch.kernel} {sizes}")
        for c in launch.constants:
            content = hexed(struct.pack(FORMATS[c.type], c.value))
            lines.append(f"constant {c.index} {c.type} {content}")
        for b in launch.buffers:
            lines.append(f"buffer {b.index} {b.role} {ACCESS.index(access(b))} {b.offset_bytes}")
        lines += [f"params {p.index} {hexed(p.bytes)}" for p in launch.params]
        lines += [f"threadgroup {t.index} {t.bytes}" for t in launch.threadgroup_memory]
    return lines


def record(recorder, plan, roles, *more: str) -> list[str]:
    text = "\n".join([*more, *plan_text(plan, roles)])
    return recorder.record(text.encode()).decode().splitlines()


def roles_of(plan) -> list[str]:
    """The arrays that an op hands over: what is neither scratch nor host data."""
    own = {x.role for x in [*plan.scratch, *plan.host_data]}
    return sorted({b.role for launch in plan.launches for b in launch.buffers} - own)


def pipeline_name(launch) -> str:
    name = launch.kernel
    for c in launch.constants:
        value = re.sub(r"\.?0*p", "p", float(c.value).hex()) if c.type == "float" else int(c.value)
        name += f"_{c.index}={value}"
    return name


def source_hash(recorder, source: str) -> int:
    path = ROOT / "metal" / f"{source}.metal"
    text = load("flatten_metal").flatten(path, [ROOT / "metal"], line_markers=False)
    return recorder.text_hash(text.encode())


def expected_calls(plan, recorder) -> list[str]:
    """What the encoder must ask for, from the plan alone; barriers apart."""
    memory = [(s.role, s.bytes) for s in plan.scratch]
    memory += [(h.role, len(h.bytes)) for h in plan.host_data]
    names = {role: f"temporary{i}" for i, (role, _) in enumerate(memory)}
    calls = [f"temporary {names[role]} {max(size, 1)}" for role, size in memory]
    built = set()
    for launch in plan.launches:
        library = f"chunkdelta/{launch.source}"
        built_from = "" if library in built else f" {source_hash(recorder, launch.source)}"
        built.add(library)
        calls.append(f"library {library}{built_from}")
        constants = "".join(
            f" {c.index}:{METAL_TYPES[c.type]}:{struct.pack(FORMATS[c.type], c.value).hex()}"
            for c in launch.constants
        )
        calls.append(f"kernel {launch.kernel} {library} {pipeline_name(launch)}{constants}")
        calls.append(f"pipeline {pipeline_name(launch)}")
        for b in launch.buffers:
            call = "input" if access(b) == "Read" else "output"
            calls.append(f"{call} {b.index} {names.get(b.role, b.role)} {b.offset_bytes}")
        calls += [f"bytes {p.index} {p.bytes.hex()}" for p in launch.params]
        calls += [f"threadgroup {t.index} {t.bytes}" for t in launch.threadgroup_memory]
        calls.append(f"check {launch.kernel}")
        sizes = " ".join(map(str, [*launch.grid, *launch.threadgroup]))
        calls.append(f"dispatch {sizes}")
    return calls


def barrier_needed(earlier, later) -> bool:
    written = {b.role for b in earlier.buffers if access(b) != "Read"}
    touched = {b.role for b in earlier.buffers}
    return any(
        b.role in written or (access(b) != "Read" and b.role in touched) for b in later.buffers
    )


def check_recorded(recorder, plan):
    lines = record(recorder, plan, roles_of(plan))
    own = ("cores", "content", "barrier")
    calls = [line for line in lines if not line.startswith(own)]
    assert calls == expected_calls(plan, recorder)

    contents = dict(line.split(" ")[1:] for line in lines if line.startswith("content"))
    for i, h in enumerate(plan.host_data, len(plan.scratch)):
        assert contents[f"temporary{i}"].startswith(h.bytes.hex())

    # No two launches that need an order are without a barrier between them.
    epoch, epochs = 0, []
    for line in lines:
        epoch += line == "barrier"
        if line.startswith("dispatch"):
            epochs.append(epoch)
    for j, later in enumerate(plan.launches):
        for i, earlier in enumerate(plan.launches[:j]):
            assert epochs[i] < epochs[j] or not barrier_needed(earlier, later), (i, j)


@pytest.mark.parametrize("plan", [pytest.param(make, id=name) for name, make in PLANS.items()])
def test_calls_are_those_of_the_plan(recorder, plan):
    check_recorded(recorder, plan())


def test_every_op_with_a_plan_is_here():
    functions = {name for name in dir(_ext.plans) if name.islower() and not name.startswith("_")}
    others = {"metal_sources", "attention_tile_table", "capture"}
    assert functions - others == {name.split("-")[0] for name in PLANS}


# ------------------------------------------------------------------ plans made up for the encoder


@dataclass
class Binding:
    index: int
    role: str
    access: str
    offset_bytes: int = 0


@dataclass
class Item:
    index: int = 0
    role: str = ""
    bytes: Any = 0
    value: Any = 0
    type: str = ""


@dataclass
class Launch:
    buffers: list[Binding] = field(default_factory=list)
    constants: list[Item] = field(default_factory=list)
    params: list[Item] = field(default_factory=list)
    threadgroup_memory: list[Item] = field(default_factory=list)
    source: str = "conv/causal_conv1d"
    kernel: str = "made_up"
    grid: tuple[int, int, int] = (3, 2, 1)
    threadgroup: tuple[int, int, int] = (64, 2, 1)


@dataclass
class Plan:
    launches: list[Launch]
    scratch: list[Item] = field(default_factory=list)
    host_data: list[Item] = field(default_factory=list)
    op: str = "made_up"


def test_every_kind_of_binding(recorder):
    plan = Plan(
        [
            Launch(
                buffers=[
                    Binding(0, "x", "Read", 24),
                    Binding(3, "work", "Write", 256),
                    Binding(4, "table", "Read"),
                    Binding(5, "empty", "Read"),
                    Binding(6, "pool", "ReadWrite", 8),
                ],
                constants=[
                    Item(1, type="bool", value=True),
                    Item(2, type="bool", value=False),
                    Item(3, type="int", value=-7),
                    Item(4, type="uint", value=2**32 - 1),
                    Item(5, type="float", value=0.1875),
                ],
                params=[Item(1, bytes=bytes(range(40)))],
                threadgroup_memory=[Item(0, bytes=1024), Item(1, bytes=48)],
            ),
            Launch(buffers=[Binding(0, "work", "Read"), Binding(1, "y", "Write")]),
        ],
        scratch=[Item(role="work", bytes=4096)],
        host_data=[Item(role="table", bytes=b"\x01\x02\xff"), Item(role="empty", bytes=b"")],
    )
    check_recorded(recorder, plan)
    assert record(recorder, plan, roles_of(plan)).count("barrier") == 1


@pytest.mark.parametrize(
    ("first", "second", "barriers"),
    [("Read", "Read", 0), ("Write", "Read", 1), ("Read", "Write", 1), ("ReadWrite", "Write", 1)],
)
def test_barriers_stand_where_launches_share_a_buffer(recorder, first, second, barriers):
    plan = Plan([Launch([Binding(0, "x", first)]), Launch([Binding(0, "x", second)])])
    check_recorded(recorder, plan)
    assert record(recorder, plan, ["x"]).count("barrier") == barriers


def test_tokens_order_what_shares_no_array(recorder):
    """Before anything is dispatched: the writer binds its readers' tokens, a reader its own."""
    plan = Plan([Launch([Binding(0, "x", "Read")]), Launch([Binding(0, "y", "Write")])])
    lines = record(recorder, plan, ["x", "y"], "waits first", "waits second", "signals token")
    order = [line for line in lines if line.startswith(("input 30", "signal", "dispatch"))]
    assert order[:3] == ["input 30 first 0", "input 30 second 0", "signal token"]
    assert [line.split()[0] for line in order[3:]] == ["dispatch", "dispatch"]
    assert record(recorder, Plan([]), [], "waits first", "signals token")[1:] == []


def test_specialisations_have_different_names(recorder):
    """MLX caches pipelines by name for the whole process."""
    values = [("bool", True), ("bool", False), ("int", 3), ("float", 0.1), ("float", 0.1 + 2**-26)]
    plan = Plan([Launch(constants=[Item(7, type=t, value=v)]) for t, v in values])
    names = [line for line in record(recorder, plan, []) if line.startswith("pipeline")]
    assert len(set(names)) == len(values)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan([Launch([Binding(0, "nobody", "Read")])]), "binds the unknown role nobody"),
        (Plan([Launch([Binding(30, "nobody", "Read")])]), "binds the index of tokens"),
        (Plan([Launch(source="no/where")]), "names the unknown source no/where"),
        (Plan([Launch(params=[Item(0, bytes=bytes(4097))])]), "passes params of 4097 bytes"),
        (Plan([], scratch=[Item(role="work", bytes=2**31)]), "asks for 2147483648 bytes for work"),
    ],
)
def test_refuses_what_no_device_could_run(recorder, plan, message):
    (error,) = [x for x in record(recorder, plan, []) if x.startswith("error")]
    assert error == f"error [made_up] launch plan {message}"


def test_threadgroups_are_held_against_the_pipeline(recorder):
    """A kernel that needs many registers may allow fewer threads than 1,024."""
    plan = Plan([Launch()])
    assert record(recorder, plan, [], "max_threads 128")[-1].startswith("dispatch")
    lines = record(recorder, plan, [], "max_threads 127")
    assert lines[-1].startswith("error Maximum threads per threadgroup")
    assert not any(line.startswith("dispatch") for line in lines)


@pytest.mark.parametrize(
    ("architecture", "cores"),
    [("applegpu_g13g", 7), ("applegpu_g14s", 14), ("applegpu_g15c", 24), ("applegpu_g13d", 48)],
)
def test_cores_follow_the_architecture(recorder, architecture, cores):
    lines = record(recorder, Plan([]), [], f"architecture {architecture}")
    assert lines[0] == f"cores {cores}"
