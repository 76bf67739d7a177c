"""Prefill where some simdgroups only decode gives what it gives where all decode and multiply."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
import simulator_library
from simulator_library import HERE, Simulator, SimulatorError

KERNELS = HERE / "prefill_kernels.metal"
WIDTH, SIMDS, PRODUCERS = 64, 4, 4
ROWS = 16 * SIMDS
BATCH, HEADS, KV_HEADS, QUERIES = 1, 4, 2, 50  # two tiles of rows, the second partly empty


def structure(name: str, **fields: type) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


def ints(names: str) -> dict[str, type]:
    return dict.fromkeys(names.split(), ctypes.c_int)


# as in metal/params.h
Code = structure(
    "Code", **ints("bytes window stride dims entries rows per_head per_group scaled centred")
)
Basis = structure("Basis", **ints("order per_head"), scale=ctypes.c_float)
Params = structure(
    "Params",
    key=Code,
    pair=Code,
    value=Code,
    key_basis=Basis,
    value_basis=Basis,
    mask_strides=ctypes.c_long * 4,
    **ints(
        "batch heads kv_heads queries key_dim value_dim body tail sink_tokens window block causal"
        " mask mask_columns sinks splits tail_splits uniform tokens coded tail_start separate"
    ),
    scale=ctypes.c_float,
)


@pytest.fixture(scope="module")
def libraries(
    compiler: list[str], tmp_path_factory: pytest.TempPathFactory
) -> dict[int, Simulator]:
    """By the number of simdgroups that only decode."""
    folder = tmp_path_factory.mktemp("prefill")
    return {
        n: Simulator(
            simulator_library.build(
                compiler,
                folder / f"prefill{n}.so",
                f"-DTILE_PRODUCERS={n}",
                f"-DVQKV_SIM_THREADGROUP_MEMORY={64 << 10}",
                kernels=[KERNELS],
                races=True,
            )
        )
        for n in (0, PRODUCERS)
    }


def bfloat16(x: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


class Case:
    """Buffers and parameters of a call: codes, then a causal tail. `code`: the values of a byte, or
    `trellis` and the bits of a value, of keys and of values where they differ."""

    def __init__(self, code: str, scaled: bool, coded: int, tail: int, splits: int) -> None:
        trellis = code.startswith("trellis")
        bits = code.removeprefix("trellis")
        strides = (int(bits[0]), int(bits[-1])) if trellis else (8, 8)
        dims = 1 if trellis else int(code)
        rows = [WIDTH * stride // 8 // dims + trellis for stride in strides]
        rng = np.random.default_rng(coded + rows[0])
        kv = (BATCH, KV_HEADS)
        codes = [rng.integers(0, 256, (*kv, coded, row), np.uint8) for row in rows]
        tables = [rng.normal(0, 0.5, (256, dims)).astype(np.float32) for _ in range(2)]
        # scales that grow raise the unit of a tile again and again
        growth = np.exp2(np.linspace(-4, 4, coded))
        scales = [bfloat16(growth * rng.uniform(0.5, 1, (*kv, coded))) for _ in range(2)]
        blocks = coded // 64
        centres = rng.integers(-127, 128, (*kv, blocks, WIDTH)).astype(np.int8)
        centre_scales = bfloat16(rng.uniform(0, 0.02, (*kv, blocks)))
        q = rng.normal(size=(BATCH, HEADS, QUERIES, WIDTH)).astype(np.float16)
        vectors = [rng.normal(size=(*kv, tail, WIDTH)).astype(np.float16) for _ in range(2)]
        none = np.zeros(64, np.uint8)
        key, value = (
            Code(rows[i], 8, strides[i], dims, WIDTH // dims, 256, 0, 0, scaled, scaled and i == 0)
            for i in range(2)
        )
        self.kernel = "prefill_trellis" if len(bits) == 2 else f"prefill_{code}"
        slices = splits + (tail > 0)
        self.params = Params(
            key=key,
            value=value,
            batch=BATCH,
            heads=HEADS,
            kv_heads=KV_HEADS,
            queries=QUERIES,
            key_dim=WIDTH,
            value_dim=WIDTH,
            body=coded,
            tail=tail,
            block=64,
            causal=tail > 0,
            splits=splits,
            tail_splits=slices - splits,
            uniform=1,
            tokens=coded + tail,
            coded=coded,
            tail_start=coded,
            scale=math.log2(math.e) / math.sqrt(WIDTH),
        )
        self.inputs = [
            *(q, q.astype(np.float32), none, *vectors),
            *(codes[0], tables[0], scales[0], centres, centre_scales),
            *(none, none.view(np.float32), none),
            *(codes[1], tables[1], scales[1], none, none, none, none.view(np.float32)),
        ]
        self.grid = (-(-HEADS // KV_HEADS * QUERIES // ROWS), BATCH * KV_HEADS, slices)
        rows = BATCH * HEADS * QUERIES
        self.shapes = ((rows, slices, WIDTH), (rows, slices, 2))

    def run(self, simulator: Simulator, producers: int) -> list[np.ndarray]:
        out = [np.zeros(shape, np.float32) for shape in self.shapes]
        threads = 32 * (SIMDS + producers)
        simulator.run(self.kernel, self.inputs, out, bytes(self.params), self.grid, threads)
        return out


CASES = {
    "plain, one step": ("4", False, 64, 0, 1),
    "scaled and centred, slices": ("2", True, 448, 0, 2),
    "scaled and centred, more slices than steps": ("4", True, 64, 0, 3),
    "scaled and centred, tail": ("4", True, 192, 75, 1),
    "trellis, slices, tail": ("trellis3", True, 320, 75, 2),
    **{
        f"trellises of {keys} and {values} bits": (f"trellis{keys}{values}", True, 192, 75, 2)
        for keys, values in ((1, 4), (2, 3), (3, 1), (4, 2))
    },
    "tail alone": ("2", False, 0, 75, 0),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_same_results(libraries: dict[int, Simulator], case: tuple) -> None:
    of = Case(*case)
    want, want_sums = of.run(libraries[0], 0)
    got, got_sums = of.run(libraries[PRODUCERS], PRODUCERS)
    # references of weights are of the same tiles; sums are of the same numbers in another order
    np.testing.assert_allclose(got_sums, want_sums, rtol=1e-5)
    top = np.abs(want).max(axis=-1, keepdims=True)
    assert top.max() > 0
    # a unit that was raised earlier or later rounds values otherwise, by 2^-11 of the largest
    assert (np.abs(got - want) <= 2e-3 * top + 1e-6).all()


def test_a_gate_that_stays_shut_is_reported(libraries: dict[int, Simulator]) -> None:
    of = Case(*CASES["plain, one step"])
    with pytest.raises(SimulatorError, match="deadlock"):
        of.run(libraries[PRODUCERS], PRODUCERS - 1)
