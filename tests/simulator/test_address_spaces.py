"""The type check that stands in for Apple's compiler: kernels pass, planted mistakes do not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

HELPER = """
#include "{root}/metal/prelude.h"
METAL_FUNC void f(device float* a, threadgroup float* t, constant float& c, uint i) {{
  {body}
}}
"""
KERNEL = """
#include "{root}/metal/prelude.h"
struct P {{ uint n; }};
template <int X>
kernel void k({arguments}) {{
  {body}
}}
instantiate_kernel(k, k, 0)
"""
BUFFERS = [
    "device const float* in [[buffer(0)]]",
    "device float* out [[buffer(1)]]",
    "constant P& p [[buffer(2)]]",
]
BUILTINS = [
    "uint3 tgid [[threadgroup_position_in_grid]]",
    "uint tid [[thread_index_in_threadgroup]]",
    "uint lane [[thread_index_in_simdgroup]]",
    "uint sg [[simdgroup_index_in_threadgroup]]",
]

GOOD_BODY = """
  float x = 1.0f;
  device const uchar* b = (device const uchar*)a;
  t[i] = a[i] + c + x * float4(1.0f).x + float(b[0]) + float(bfloat(x));
  half4 h = half4(float4(x, x, c, c));
  a[i] = float(metal::dot(h, h)) + simd_sum(x) + float(metal::max(ulong(i), ulong(2)));
"""

# what the compiler itself rejects
REJECTED = {
    "device to threadgroup pointer": "threadgroup float* p = a; p[0] = 0.0f;",
    "threadgroup to thread pointer": "thread float* p = t; p[0] = 0.0f;",
    "device element as thread reference": "thread float& r = a[0]; r = 0.0f;",
    "write to constant": "c = 1.0f;",
    "assignment across spaces": "device float4* p = (device float4*)a; threadgroup float4* q = p;",
    "address of a local as device": "float x; device float* p = &x; p[0] = 0.0f;",
    "sum of pointer into another space": "device float* p = t + 1; p[0] = 0.0f;",
    "double arithmetic": "a[i] = a[i] * 2.0;",
    "double type": "double d = 1; a[i] = float(d);",
    "half to bfloat": "half h = half(a[0]); bfloat b = h; a[0] = float(b);",
    "vector conversion without a cast": "half4 h = float4(c); a[0] = float(h.x);",
    "math function of bfloat": "a[0] = float(metal::exp(bfloat(c)));",
    "simdgroup function of bfloat": "bfloat b = bfloat(c); a[0] = float(simd_sum(b));",
    "simdgroup function of 64 bits": "a[0] = float(simd_max(ulong(i)));",
    "mixed min": "a[0] = float(metal::min(i, 3));",
    "as_type of another size": "a[0] = as_type<float>(ushort(i));",
    "float atan2, not in the prelude": "a[0] = metal::atan2(a[0], c);",
    "unused variable": "int k;",
    "host library": "a[0] = std::sqrt(a[0]);",
}
# what only the syntax tree shows
REPORTED = {
    "pointer without a space": ("float x = c; float* p = &x; a[0] = *p;", "f: p: 'float *'"),
    "reference without a space": ("float x = c; float& p = x; a[0] = p;", "f: p: 'float &'"),
    "cast without a space": ("a[0] = *(float*)(ulong)i;", "a cast to 'float *'"),
    "second level without a space": ("device float** p = 0; (void)p;", "'device float **'"),
    "double literal": ("float x = 2.0; a[0] = x;", "double literal"),
    "long long": ("long long x = 2; a[0] = float(x);", "no 'long long'"),
    "lambda": ("auto g = [](int k) { return k; }; a[0] = float(g(1));", "lambda"),
    "threadgroup array in a function": (
        "threadgroup_array(float, b, 4); b[0] = c;",
        "b must be declared in a kernel",
    ),
}


def load_tool() -> ModuleType:
    path = ROOT / "tools" / "check_address_spaces.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


tool = load_tool()
compiler = tool.find_compiler()
pytestmark = pytest.mark.skipif(compiler is None, reason="no clang that knows __bf16")


def check(tmp_path: Path, text: str, **fields: str) -> list[str]:
    source = tmp_path / "snippet.metal"
    source.write_text(text.format(root=ROOT, **fields))
    return tool.check(source, compiler)


@pytest.mark.parametrize(
    "source",
    [tool.KERNELS, *sorted(HERE.glob("*.metal"))],
    ids=lambda p: p.name,
)
def test_kernels_pass(source: Path) -> None:
    assert tool.check(source, compiler) == []


def test_every_kernel_file_is_listed() -> None:
    listed = tool.KERNELS.read_text()
    for path in (ROOT / "metal").glob("*.metal"):
        assert f'#include "../../metal/{path.name}"' in listed


def test_good_snippet_passes(tmp_path: Path) -> None:
    assert check(tmp_path, HELPER, body=GOOD_BODY) == []
    out = "threadgroup_array(float, b, 4); b[tid & 3] = in[tid]; out[tid] = b[tid & 3];"
    assert check(tmp_path, KERNEL, arguments=", ".join(BUFFERS + BUILTINS), body=out) == []


@pytest.mark.parametrize("body", REJECTED.values(), ids=REJECTED.keys())
def test_compiler_rejects(tmp_path: Path, body: str) -> None:
    assert "error:" in check(tmp_path, HELPER, body=body)[0]


@pytest.mark.parametrize("body, message", REPORTED.values(), ids=REPORTED.keys())
def test_tree_check_reports(tmp_path: Path, body: str, message: str) -> None:
    found = check(tmp_path, HELPER, body=body)
    assert found and any(message in f for f in found), found


def test_tree_check_reports_nested_threadgroup_array(tmp_path: Path) -> None:
    body = "if (tid > 3) { threadgroup_array(float, b, 4); b[0] = in[0]; out[0] = b[0]; }"
    found = check(tmp_path, KERNEL, arguments=", ".join(BUFFERS + BUILTINS), body=body)
    assert found == ["k: the threadgroup array b must be in the outermost scope"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (BUFFERS[:1] + BUFFERS[2:] + BUILTINS, "must be [[buffer(1)]]"),
        (BUFFERS[1::-1] + BUFFERS[2:] + BUILTINS, "must be [[buffer(0)]]"),
        (BUFFERS + [BUILTINS[0], *BUILTINS[2:0:-1], BUILTINS[3]], "[[thread_index_in_thr"),
        (BUFFERS + BUILTINS[:3], "must have uint3"),
        (
            BUFFERS[:2] + ["device P& p [[buffer(2)]]"] + BUILTINS,
            "must be `constant Params& p`",
        ),
        (BUFFERS[2:] + BUILTINS, "a kernel takes"),
    ],
    ids=["gap", "order", "built-ins swapped", "built-in missing", "params space", "no buffer"],
)
def test_signature_is_checked(tmp_path: Path, arguments: list[str], message: str) -> None:
    found = check(tmp_path, KERNEL, arguments=", ".join(arguments), body="")
    assert any(message in f for f in found), found
