#!/usr/bin/env python3
"""Checks Metal kernels with clang, on any machine, for what Apple's compiler would reject.

1. The kernels compile with real address spaces (metal/compat/check.h).
2. Every pointer and reference names its address space; threadgroup arrays are declared in the
   outermost scope of a kernel; no double, 64-bit `long long` or lambda.
3. Every kernel takes buffers 0, 1, ..., then `constant Params&`, then the four built-ins.

Exit code: 0 if nothing was found, 1 if something was, 2 without a suitable compiler.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "csrc" / "simulator" / "kernels.cpp"
FLAGS = "-std=c++14 -DMSL_CHECK -x c++".split()
WARNINGS = (
    "-Wall -Wextra -Wdouble-promotion -Werror -Wno-unknown-attributes -Wno-unused-parameter "
    "-Wno-c++17-extensions -Wno-undefined-inline -Wno-undefined-internal -Wno-pass-failed"
).split()
# templates are instantiated, machine code and zig's own instrumentation are not made
NO_CODE = "-emit-llvm -g0 -fno-sanitize=all".split()
PROBE = "_Float16 h(__bf16 b) { float f = b + b; return (_Float16)f; }"
BUILTINS = (
    ("uint3", "threadgroup_position_in_grid"),
    ("uint", "thread_index_in_threadgroup"),
    ("uint", "thread_index_in_simdgroup"),
    ("uint", "simdgroup_index_in_threadgroup"),
)
MAX_BUFFERS = 31  # argument slots of a Metal kernel, the params included

SPACES = {"1": "device", "2": "constant", "3": "threadgroup", "5": "thread"}  # as in check.h
SPACE = re.compile(rf"\b(?:{'|'.join(SPACES.values())})\b")
ATTRIBUTE = re.compile(r"__attribute__\(\(address_space\((\d)\)\)\)")
NODE = re.compile(r"^([| `-]*)(\w+) 0x[0-9a-f]+ ")
POINTER_NODES = {
    "ParmVarDecl",
    "VarDecl",
    "FieldDecl",
    "TypeAliasDecl",
    "TypedefDecl",
    "CStyleCastExpr",
    "CXXStaticCastExpr",
    "CXXReinterpretCastExpr",
    "CXXConstCastExpr",
}
FUNCTION_NODES = {"FunctionDecl", "CXXMethodDecl", "CXXConstructorDecl", "CXXConversionDecl"}


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    # zig would answer a repeated command from its cache, without the output
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "ZIG_LOCAL_CACHE_DIR": cache}
        return subprocess.run(command, capture_output=True, text=True, env=env)


def compile_source(
    compiler: Sequence[str], source: Path, *flags: str
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out.o"
        return run([*compiler, *FLAGS, *flags, "-c", str(source), "-o", str(output)])


@functools.cache
def find_compiler() -> tuple[str, ...] | None:
    """A clang that knows half and bfloat: ziglang's, else clang 17 or later."""
    candidates = [(sys.executable, "-m", "ziglang", "c++")]
    names = ["clang++", *(f"clang++-{v}" for v in range(30, 16, -1))]
    candidates += [(path,) for name in names if (path := shutil.which(name))]
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder) / "probe.cpp"
        probe.write_text(PROBE)
        for c in candidates:
            if compile_source(c, probe).returncode == 0:
                return c
    return None


def check_types(compiler: Sequence[str], source: Path) -> list[str]:
    result = compile_source(compiler, source, *WARNINGS, *NO_CODE)
    return [result.stderr.strip()] if result.returncode else []


def nodes(compiler: Sequence[str], source: Path) -> Iterator[tuple[int, str, str]]:
    """Depth, kind and text of each node of the syntax tree, kernels not instantiated.

    Here `thread` is an address space too; the errors this causes do not matter.
    """
    flags = "-DMSL_CHECK_THREAD -w -ferror-limit=0 -fno-color-diagnostics -Xclang -ast-dump".split()
    result = compile_source(compiler, source, *flags)
    found = False
    implicit: int | None = None  # depth of the compiler's own declaration around the node
    for line in result.stdout.splitlines():
        if m := NODE.match(line):
            found = True
            depth = len(m[1]) // 2
            if implicit is not None and depth > implicit:
                continue
            implicit = depth if "Decl" in m[2] and " implicit " in line else None
            if implicit is None:
                yield depth, m[2], line[m.end() :]
    if not found:
        raise RuntimeError(f"{compiler[0]} gave no syntax tree for {source}:\n{result.stderr}")


def spell(text: str) -> str:
    """Address spaces by their names."""
    return ATTRIBUTE.sub(lambda m: SPACES[m[1]], text)


def bare(type_name: str) -> bool:
    """Has the type more pointers and references than address spaces?"""
    t = re.sub(r"\[[^]]*\]", "", type_name).replace("&&", "&")
    spaces = len(SPACE.findall(t))
    t = SPACE.sub("", t)
    return t.count("*") + t.count("&") > spaces


def check_tree(compiler: Sequence[str], source: Path) -> list[str]:
    found: dict[str, None] = {}  # in order, each once

    def report(message: str) -> None:
        found[f"{function[1]}: {message}" if function else message] = None

    # the function around the node: its depth, name, and threadgroup arrays
    function: tuple[int, str] | None = None
    arrays: list[str] = []
    is_kernel = False

    def leave() -> None:
        if function and arrays and not is_kernel:
            report(f"the threadgroup array {arrays[0]} must be declared in a kernel")

    for depth, kind, text in nodes(compiler, source):
        if function and depth <= function[0]:
            leave()
            function = None
        m = re.search(r"(\w+|operator\S+)? ?'([^']*)'", text)
        name, type_name = (m[1] or "", spell(m[2])) if m else ("", "")
        if kind in FUNCTION_NODES:
            function, arrays, is_kernel = (depth, name), [], False
            if bare(type_name.split("(")[0]):
                report(f"the result of '{type_name}' names no address space")
        elif kind == "AnnotateAttr" and '"kernel"' in text:
            is_kernel = True
        elif kind in POINTER_NODES:
            if bare(type_name):
                what = "a cast to" if kind.endswith("Expr") else f"{name}:"
                report(f"{what} '{type_name}' names no address space")
            if "long long" in type_name or re.search(r"\bdouble\b", type_name):
                report(f"{name}: MSL has no '{type_name}'")
            is_array = type_name.startswith("threadgroup ") and not re.search("[*&]", type_name)
            if kind == "VarDecl" and is_array:
                arrays.append(name)
                if function and depth != function[0] + 3:
                    report(f"the threadgroup array {name} must be in the outermost scope")
        elif kind == "FloatingLiteral" and type_name == "double":
            report(f"double literal {text.split()[-1]}: needs an f suffix")
        elif kind == "LambdaExpr":
            report("MSL has no lambda expressions")
    leave()
    return list(found)


def kernel_signatures(preprocessed: str) -> Iterator[tuple[str, list[str]]]:
    """Name and parameters of each kernel function."""
    for m in re.finditer(
        r'__attribute__\(\(annotate\("kernel"\)\)\)\s+void\s+(\w+)\s*\(', preprocessed
    ):
        depth, begin, params = 1, m.end(), []
        for i in range(m.end(), len(preprocessed)):
            c = preprocessed[i]
            depth += (c in "([{") - (c in ")]}")
            if depth == 0 or (depth == 1 and c == ","):
                params.append(" ".join(preprocessed[begin:i].split()))
                begin = i + 1
            if depth == 0:
                break
        yield m[1], params


def check_signature(name: str, params: list[str]) -> Iterator[str]:
    def attribute(p: str) -> str:
        m = re.search(r"\[\[\s*(.*?)\s*\]\]", p)
        return m[1] if m else ""

    if len(params) < len(BUILTINS) + 2:
        yield f"{name}: a kernel takes buffers, params and the four built-ins"
        return
    *buffers, block, _, _, _, _ = params
    for p, (type_name, expected) in zip(params[-4:], BUILTINS, strict=True):
        if p.split()[0] != type_name or attribute(p) != expected:
            yield f"{name}: must have {type_name} [[{expected}]] in place of '{p}'"
    for i, p in enumerate([*buffers, block]):
        if attribute(p) != f"buffer({i})":
            yield f"{name}: '{p}' must be [[buffer({i})]]"
    for p in buffers:
        if not re.match(r"(const )?(device|constant) .*\*", p):
            yield f"{name}: the buffer '{p}' must be a device or constant pointer"
    if not re.match(r"const constant \w+ ?& ?\w+", block):
        yield f"{name}: '{block}' must be `constant Params& p`"
    if len(buffers) + 1 > MAX_BUFFERS:
        yield f"{name}: has {len(buffers) + 1} arguments in buffers, but Metal takes {MAX_BUFFERS}"


def check_signatures(compiler: Sequence[str], source: Path) -> list[str]:
    result = run([*compiler, *FLAGS, "-E", "-P", str(source)])
    if result.returncode:
        return [result.stderr.strip()]
    return [m for k in kernel_signatures(spell(result.stdout)) for m in check_signature(*k)]


def check(source: Path, compiler: Sequence[str]) -> list[str]:
    """What is wrong with the kernels of a source file."""
    if errors := check_types(compiler, source):
        return errors
    return check_tree(compiler, source) + check_signatures(compiler, source)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="*", type=Path, default=[KERNELS])
    args = parser.parse_args()
    compiler = find_compiler()
    if compiler is None:
        print("no clang that knows __bf16: pip install ziglang, or clang 17 or later")
        return 2
    errors = [e for s in args.sources for e in check(s, compiler)]
    print("\n".join(errors) or "address spaces and signatures: ok")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
