"""benchmarks/key_transforms.py: bases that keep products, and what they are least for."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import writing
from test_cli import save_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import key_transforms as module  # noqa: E402


@pytest.fixture
def vectors(rng):
    mix = rng.standard_normal((2, 16, 16))
    q = (rng.standard_normal((2, 3, 128, 16)) @ mix[:, None]).astype(np.float32)
    k = (rng.standard_normal((2, 128, 16)) * rng.uniform(0.1, 9, 16)).astype(np.float32)
    return q, k, rng.standard_normal((2, 128, 16)).astype(np.float32)


def test_bases_keep_products(vectors):
    q, k, _ = vectors
    want = q @ k[:, None].swapaxes(-1, -2)
    found = module.bases(vectors)
    assert len(found) == 5
    for kind, basis in found.items():
        turned = np.array(basis.query(mx.array(q.reshape(1, 6, 128, 16)))).reshape(q.shape)
        keys = np.array(basis.forward(mx.array(k[None])))[0]
        got = turned @ keys[:, None].swapaxes(-1, -2)
        assert np.abs(got - want).max() < 1e-3 * np.abs(want).max(), kind


def test_matrix_is_the_best(rng, vectors):
    """No other matrix has a smaller error, and factors are between it and none."""
    keys, queries = (x[0] for x in module.covariances(vectors, False))

    def error(root):
        square = root @ root.T
        return np.trace(queries @ np.linalg.inv(square)) * np.trace(keys @ square)

    best = module.geometric_mean(keys, queries)
    for _ in range(20):
        other = module.power(best @ best + 0.1 * np.diag(rng.uniform(size=16)), 0.5)
        assert error(best) < error(other)
    factors = np.diag((np.diag(queries) / np.diag(keys)) ** 0.25)
    assert error(best) < error(factors) < error(np.eye(16))


def test_weights_leave_out_what_is_not_coded(vectors):
    q, k, v = vectors
    changed = k.copy()
    changed[:, :4] += 100.0 * np.abs(changed[:, :4])  # sinks attract, but are not coded
    small = v * 0
    keys, queries = module.covariances((q, k, small), True)
    assert not keys.any() and not queries.any()
    plain = module.covariances((q, k, v), True)
    sunk = module.covariances((q, changed, v), True)
    assert np.trace(sunk[1][0]) < np.trace(plain[1][0])


def test_script(tmp_path, monkeypatch):
    text, numbers = tmp_path / "text.txt", tmp_path / "n.json"
    text.write_text("It was a dark and stormy night.\n" * 7, encoding="utf-8")
    model = save_model(tmp_path / "tiny", writing.llama())
    command = ["--model", str(model), "--texts", str(text), "--tokens", "200"]
    module.main([*command, "--calibration", "128", "--json", str(numbers)])
    found = json.loads(numbers.read_text())["kl"]["text"]
    assert len(found) == 6 and all(kl > 0 for kl in found.values())
    assert len(set(found.values())) == 6
