"""k-means on the package's own nearest-centroid kernel."""

from __future__ import annotations

import mlx.core as mx

from .. import ops


def kmeans(x: mx.array, k: int = 256, *, iterations: int = 30, seed: int = 0) -> mx.array:
    """Centroids that minimise the squared error of ``x`` (Lloyd's algorithm).

    Args:
        x: ``[H, N, d]`` float32: H independent problems of N samples.
        k: Centroids per problem.
        iterations: Rounds of assignment and mean.
        seed: Of the initial samples and of the restarts.

    Returns:
        ``[H, k, d]`` float32. A centroid that loses all its samples restarts as a sample drawn at
        random, weighted towards those with a large error.
    """
    heads, n, dims = x.shape
    if n < 1 or k < 1:
        raise ValueError(f"[kmeans] N and k must be at least 1, but got N={n} and k={k}.")
    x = x.astype(mx.float32)
    key = mx.random.key(seed)
    start = mx.random.randint(0, n, (heads, k), key=key)
    if n >= k:
        start = mx.argsort(mx.random.uniform(shape=(heads, n), key=key), axis=-1)[:, :k]
    book = mx.take_along_axis(x, start[..., None], axis=1)
    offset = (mx.arange(heads) * k)[:, None]
    for i in range(iterations):
        codes = ops.quantize_vq(x, book[:, None])[..., 0].astype(mx.int32)
        index = (codes + offset).reshape(-1)
        flat = x.reshape(-1, dims)
        total = mx.zeros((heads * k, dims)).at[index].add(flat)
        count = mx.zeros((heads * k,)).at[index].add(mx.ones(index.shape))
        mean = total / mx.maximum(count, 1.0)[:, None]
        error = (flat - mean[index]).square().sum(-1).reshape(heads, n)
        # Gumbel keys: the k largest are a draw without replacement, weighted by error
        keys = mx.log(error + 1e-30) + mx.random.gumbel(
            error.shape, key=mx.random.key(seed + i + 1)
        )
        draw = mx.argsort(-keys, axis=-1)[:, mx.arange(k) % n]
        restart = mx.take_along_axis(x, draw[..., None], axis=1).reshape(-1, dims)
        book = mx.where((count > 0)[:, None], mean, restart).reshape(heads, k, dims)
        mx.eval(book)
    return book
