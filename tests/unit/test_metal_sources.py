"""Flattened Metal sources: what MLX compiles on a user's machine."""

import pytest
from chunkdelta import _ext

from tests.build_scripts import ROOT, load

flatten_metal = load("flatten_metal")


def write(folder, **files):
    for name, text in files.items():
        (folder / name.replace("_h", ".h").replace("_metal", ".metal")).write_bytes(
            text if isinstance(text, bytes) else text.encode()
        )
    return folder / "kernel.metal"


def test_embedded_sources_are_the_flattened_files():
    """An editable build that is stale would fail here: build anew."""
    sources = flatten_metal.metal_sources(ROOT / "metal")
    embedded = _ext.plans.metal_sources()
    assert embedded.keys() == sources.keys()
    for name, path in sources.items():
        assert embedded[name] == flatten_metal.flatten(path, [ROOT / "metal"], line_markers=False)
        assert embedded[name].isascii()
        assert '#include "' not in embedded[name]


def test_headers_come_once_and_in_order(tmp_path):
    path = write(
        tmp_path,
        a_h="#pragma once\n#include <metal_stdlib>\nint a;\n",
        b_h='#pragma once\n#include <metal_stdlib>\n#include "a.h"\nint b;\n',
        kernel_metal='#include "b.h"\n#include "a.h"\nint kernel_;\n',
    )
    text = flatten_metal.flatten(path, [tmp_path], line_markers=False)
    assert text.split() == [
        "#include",
        "<metal_stdlib>",
        *["int", "a;", "int", "b;", "int", "kernel_;"],
    ]


def test_line_markers_name_the_place_of_every_line(tmp_path):
    path = write(
        tmp_path,
        a_h="#pragma once\n\nint a;\n",
        kernel_metal='int first;\n#include "a.h"\nint last;\n',
    )
    lines = flatten_metal.flatten(path, [tmp_path]).splitlines()
    assert lines[lines.index("int a;") - 3] == '#line 1 "a.h"'
    assert lines[lines.index("int last;") - 1] == '#line 3 "kernel.metal"'


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"kernel_metal": "// caf\u00e9\n"}, "kernel.metal:1:7: byte 0xc3 is not ASCII"),
        ({"kernel_metal": '\n#include "a.h"\n'}, r'kernel.metal:2: #include "a.h" is not below'),
        ({"kernel_metal": '#include "a.h"\n', "a_h": "int a;\n"}, "a.h:1: .* without #pragma once"),
        (
            {"kernel_metal": '#if X\n#include "a.h"\n#endif\n', "a_h": "#pragma once\n"},
            "kernel.metal:2: #include of a project header under #if",
        ),
    ],
)
def test_refuses(files, message, tmp_path):
    with pytest.raises(flatten_metal.FlattenError, match=message):
        flatten_metal.flatten(write(tmp_path, **files), [tmp_path])


def test_a_raw_string_delimiter_is_refused(tmp_path):
    write(tmp_path, kernel_metal='// )MSL"\n')
    with pytest.raises(flatten_metal.FlattenError, match="delimiter of a raw string"):
        flatten_metal.embed(tmp_path)
