"""Fitting and the calibration file."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import tiny
from oracle import f64
from vqkv_ext.adapters.calibrate import calibrate, collect
from vqkv_ext.codecs import Calibration
from vqkv_ext.codecs.kmeans import kmeans
from vqkv_ext.codecs.transforms import (
    SmoothedHadamard,
    has_hadamard,
)
from vqkv_ext.codecs.vecinfer import PRESETS, check_width, fit, smoothing


def test_kmeans_finds_separated_clusters(rng):
    centres = rng.standard_normal((2, 8, 3)).astype(np.float32) * 10
    x = centres[:, rng.integers(0, 8, 400)] + rng.standard_normal((2, 400, 3)) * 0.01
    book = f64(kmeans(mx.array(x.astype(np.float32)), 48, iterations=10))
    for h in range(2):
        distance = np.abs(centres[h][:, None] - book[h][None]).max(-1).min(1)
        assert distance.max() < 0.1


def test_kmeans_reaches_the_published_error(rng):
    """ALGORITHMS: a d4 K256 codebook has relative error .0972 on Gaussian vectors."""
    x = mx.array(rng.standard_normal((1, 40000, 4)).astype(np.float32))
    book = kmeans(x, 256)
    test = rng.standard_normal((20000, 4))
    distance = ((test[:, None] - f64(book)[0][None]) ** 2).sum(-1).min(1)
    assert distance.mean() / 4 < 0.0972 * 1.04


def test_kmeans_with_fewer_samples_than_centroids(rng):
    book = kmeans(mx.array(rng.standard_normal((1, 5, 2)).astype(np.float32)), 16, iterations=3)
    assert book.shape == (1, 16, 2) and bool(mx.isfinite(book).all())
    with pytest.raises(ValueError, match=r"\[kmeans\] N and k must"):
        kmeans(mx.zeros((1, 0, 2)), 4)


@pytest.mark.parametrize("width", [1, 2, 64, 80, 96, 112, 128, 192, 256, 320])
def test_transform_is_orthonormal(rng, width):
    assert has_hadamard(width)
    x = mx.array(rng.standard_normal((2, 3, 5, width)).astype(np.float32))
    basis = SmoothedHadamard(mx.ones((1, width)))
    y = basis.forward(x)
    assert mx.allclose(y.square().sum(-1), x.square().sum(-1), rtol=1e-5)
    assert mx.abs(basis.inverse(y) - x).max() < 2e-6 * (1 + mx.abs(x).max())


@pytest.mark.parametrize("width", [0, 72, 100, 144, 576, 36, 60 * 3])
def test_no_hadamard(width):
    assert not has_hadamard(width)
    with pytest.raises(ValueError, match=f"but got {width}"):
        check_width(PRESETS["vecinfer-2bit"], width, 64)


def test_transform_keeps_products(rng):
    smooth = mx.array(rng.uniform(0.1, 30, (2, 96)).astype(np.float32))
    basis = SmoothedHadamard(smooth)
    q = mx.array(rng.standard_normal((1, 6, 3, 96)).astype(np.float32))
    k = mx.array(rng.standard_normal((1, 2, 5, 96)).astype(np.float32))
    want = q.reshape(1, 2, 3, 3, 96) @ k[:, :, None].swapaxes(-1, -2)
    got = basis.query(q).reshape(1, 2, 3, 3, 96) @ basis.forward(k)[:, :, None].swapaxes(-1, -2)
    assert mx.abs(got - want).max() < 1e-5 * mx.abs(want).max()
    rounding = 2.0**-23 * mx.abs(k / smooth[:, None]).max() * smooth.max()
    assert mx.abs(basis.inverse(basis.forward(k)) - k).max() < 2 * rounding


def test_smoothing():
    k = mx.array([[[4.0, 0, -9], [1, 0, 3]]])
    assert smoothing(k).tolist() == [[2.0, 1.0, 3.0]]


def test_fit_error_falls_with_size(rng):
    k, v = (mx.array(rng.standard_normal((2, 600, 64)).astype(np.float32)) for _ in "kv")
    errors = []
    for preset in ("vecinfer-1bit", "vecinfer-2bit", "vecinfer-4bit"):
        pair = fit(PRESETS[preset], k, v, iterations=5)
        for codec, x in zip(pair, (k, v), strict=True):
            y = codec.decode(codec.encode(x[None]))[0]
            errors.append(((y - x).square().mean() / x.square().mean()).item())
    assert errors[0] > errors[2] > errors[4] and errors[1] > errors[3] > errors[5]
    assert errors[4] < 0.02


def test_collect_is_what_the_model_computes():
    model = tiny.llama()
    one = collect(model, tiny.ids(50), chunk=50)
    two = collect(model, tiny.ids(50), chunk=7)
    for (k, v), (k2, v2) in zip(one, two, strict=True):
        assert k.shape == v.shape == (2, 50, 64)
        assert mx.allclose(k, k2, atol=1e-4) and mx.allclose(v, v2, atol=1e-4)


def test_calibration_is_reproducible_and_reports_progress():
    seen = []
    args = (tiny.llama(), tiny.ids(300, seed=5), "vecinfer-2bit")
    a = calibrate(*args, iterations=2, progress=lambda i, n: seen.append((i, n)))
    b = calibrate(*args, iterations=2)
    assert seen == [(1, 2), (2, 2)]
    assert [x.key.fingerprint for x in a.layers] == [x.key.fingerprint for x in b.layers]
    assert a.layers[0].key.fingerprint != a.layers[1].key.fingerprint
    with pytest.raises(ValueError, match="preset must be one of"):
        calibrate(*args[:2], "vecinfer-5bit")
    with pytest.raises(ValueError, match="tokens must be at least 256, but got 3"):
        calibrate(args[0], [1, 2, 3], "vecinfer-2bit")


def test_file_round_trip(tmp_path):
    c = tiny.calibration()
    path = tmp_path / "c.safetensors"
    c.save(path)
    d = Calibration.load(path)
    assert (d.preset, d.shape, d.tokens) == (c.preset, c.shape, c.tokens)
    for x, y in zip(c.layers, d.layers, strict=True):
        assert x.key.fingerprint == y.key.fingerprint
        assert x.value.fingerprint == y.value.fingerprint
    assert [p.name for p in tmp_path.iterdir()] == ["c.safetensors"]


def test_bad_files(tmp_path):
    path = tmp_path / "c.safetensors"
    tiny.calibration().save(path)
    whole = path.read_bytes()
    for n in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:n])
        with pytest.raises(ValueError, match=r"\[Calibration\].*must be a complete safetensors"):
            Calibration.load(path)
    mx.save_safetensors(str(path), {"a": mx.zeros(3)}, {"format": "something"})
    with pytest.raises(ValueError, match="must have format 'vqkv_ext.calibration'"):
        Calibration.load(path)
    path.write_bytes(whole)
    arrays, meta = mx.load(str(path), return_metadata=True)
    mx.eval(arrays)
    for change, message in (
        ({"version": "99"}, "version 99|version '99'"),
        ({"preset": "vecinfer-9bit"}, "known preset"),
        ({"shape": "{}"}, "whole calibration"),
        ({"tokens": "many"}, "whole calibration.*many"),
    ):
        mx.save_safetensors(str(path), arrays, meta | change)
        with pytest.raises(ValueError, match=message):
            Calibration.load(path)
    for name, change, message in (
        ("key.codebook", lambda x: x[..., :3], r"key.codebook must be .*\(2, 1, 256, 4\)"),
        ("value.codebook", lambda x: x + mx.inf, "value.codebook must be finite"),
        ("key.smooth", lambda x: x[:1], r"key.smooth must be .*\(2, 64\)"),
        ("key.smooth", lambda x: x - x.max(), "key.smooth must be positive"),
    ):
        name = f"layers.1.{name}"
        mx.save_safetensors(str(path), arrays | {name: change(arrays[name])}, meta)
        with pytest.raises(ValueError, match=f"whole calibration.*{message}"):
            Calibration.load(path)
    no_preset = {n: x for n, x in meta.items() if n != "preset"}
    mx.save_safetensors(str(path), arrays, no_preset)
    with pytest.raises(ValueError, match="known preset.*but got ''"):
        Calibration.load(path)
    del arrays["layers.1.value.codebook"]
    mx.save_safetensors(str(path), arrays, meta)
    with pytest.raises(ValueError, match="whole calibration.*layers.1.value.codebook"):
        Calibration.load(path)
