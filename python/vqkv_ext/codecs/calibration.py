"""The calibration file: one safetensors file with the codecs of every layer of a model."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from . import presets, query_aware, vecinfer
from .base import Codec
from .product import ProductCodec
from .transforms import SmoothedHadamard

FORMAT = "vqkv_ext.calibration"
VERSION = 1


@dataclass(frozen=True)
class LayerCodecs:
    """The codecs of one layer."""

    key: Codec
    value: Codec


@dataclass(frozen=True)
class ModelShape:
    """What a model must have in common with the one that was calibrated.

    Attributes:
        model_type: mlx_lm's name of the architecture.
        layers: Attention layers.
        kv_heads: KV heads per layer.
        key_dim, value_dim: Head dimensions.
    """

    model_type: str
    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class Calibration:
    """Codecs fitted to a model, or presets chosen for its layers: ``vqkv calibrate`` writes one,
    ``make_prompt_cache`` takes one.

    Attributes:
        preset: Name of the method and its size, or of a mixture of presets and its budget.
        shape: Of the model.
        layers: The codecs, one pair per layer.
        tokens: Calibration tokens they were fitted to.
    """

    preset: str
    shape: ModelShape
    layers: list[LayerCodecs]
    tokens: int

    def check(self, shape: ModelShape) -> None:
        """Refuse a model other than the one that was calibrated.

        Raises:
            ValueError: Naming every difference.
        """
        differences = [
            f"{name} {mine!r} but the model has {theirs!r}"
            for name, mine in vars(self.shape).items()
            if (theirs := getattr(shape, name)) != mine
        ]
        if differences:
            raise ValueError(
                f"[Calibration] {self.preset} must be used with the model it was calibrated on: "
                f"it is for {'; '.join(differences)}."
            )

    def save(self, path: str | Path) -> None:
        """Write the file; its name should end in ``.safetensors``."""
        arrays: dict[str, mx.array] = {}
        names = [(layer.key.name, layer.value.name) for layer in self.layers]
        for i, (layer, pair) in enumerate(zip(self.layers, names, strict=True)):
            _check_pair(*pair)
            key, value = layer.key, layer.value
            if key.name in presets.PRESETS:
                continue
            if key.name in query_aware.PRESETS:
                arrays[f"layers.{i}.key.smooth"] = mx.abs(key.transform.diagonal)
                continue
            fitted = all(isinstance(c, ProductCodec) for c in (key, value))
            if not fitted or not isinstance(key.transform, SmoothedHadamard):
                raise ValueError(
                    f"[Calibration] the codecs named {key.name} must be VecInfer's to be saved, "
                    f"but got {type(key).__name__} and {type(value).__name__}."
                )
            arrays[f"layers.{i}.key.smooth"] = key.transform.diagonal
            arrays[f"layers.{i}.key.codebook"] = key.code.table.astype(mx.float16)
            arrays[f"layers.{i}.value.codebook"] = value.code.table.astype(mx.float16)
        metadata = {
            "format": FORMAT,
            "version": str(VERSION),
            "preset": self.preset,
            "shape": json.dumps(vars(self.shape)),
            "tokens": str(self.tokens),
        }
        if set(names) != {_names(self.preset)}:
            metadata["codecs"] = json.dumps(names)
        path = Path(path)
        part = path.with_name(f".{path.stem}.part.safetensors")  # never a half-written file
        mx.save_safetensors(str(part), arrays, metadata)
        part.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read a file.

        Raises:
            ValueError: The file is truncated, of another kind, or of another version.
            FileNotFoundError: There is none.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"[Calibration] {path} must be a file, but there is none.")
        try:
            arrays, metadata = mx.load(str(path), format="safetensors", return_metadata=True)
            mx.eval(arrays)
        except Exception as e:
            raise ValueError(
                f"[Calibration] {path} must be a complete safetensors file, but reading it failed: "
                f"{e}"
            ) from e
        if metadata.get("format") != FORMAT or metadata.get("version") != str(VERSION):
            raise ValueError(
                f"[Calibration] {path} must have format {FORMAT!r} version {VERSION}, but got "
                f"{metadata.get('format')!r} version {metadata.get('version')!r}."
            )
        preset = metadata.get("preset", "")
        try:
            shape = ModelShape(**json.loads(metadata["shape"]))
            names = [_names(preset)] * shape.layers
            if "codecs" in metadata:
                names = [(key, value) for key, value in json.loads(metadata["codecs"])]
            for pair in names:
                _check_pair(*pair)
            make = functools.cache(presets.codec)
            layers = [
                _fitted(key, shape, arrays, i)
                if key in vecinfer.PRESETS
                else LayerCodecs(
                    _query_aware(key, shape, arrays, i)
                    if key in query_aware.PRESETS
                    else make(key, shape.key_dim, "key"),
                    make(value, shape.value_dim, "value"),
                )
                for i, (key, value) in zip(range(shape.layers), names, strict=True)
            ]
            tokens = int(metadata["tokens"])
        except (KeyError, TypeError, ValueError) as e:
            raise ValueError(
                f"[Calibration] {path} must hold a whole calibration, but reading it failed: "
                f"{str(e).rstrip('.')}."
            ) from e
        return cls(preset, shape, layers, tokens)


_LAYER = ("key.smooth", "key.codebook", "value.codebook")


def _names(preset: str) -> tuple[str, str]:
    """Of the codecs of a layer for keys and values, where all layers have those of a preset."""
    return preset, query_aware.value_preset(preset)


def _check_pair(key: str, value: str) -> None:
    """Refuse names that no layer can have.

    Raises:
        ValueError: An unknown name, or two that do not go together.
    """
    known = {*presets.PRESETS, *vecinfer.PRESETS, *query_aware.PRESETS}
    if unknown := sorted({str(n) for n in (key, value)} - known):
        raise ValueError(
            f"[Calibration] codecs must be of known presets ({', '.join(sorted(known))}), but got "
            f"{', '.join(map(repr, unknown))}."
        )
    if value in query_aware.PRESETS:
        raise ValueError(
            f"[Calibration] values must have another codec than the keys' {value}, but got it for "
            f"values, with {key} for keys."
        )
    if key != value and (key in vecinfer.PRESETS or value in vecinfer.PRESETS):
        raise ValueError(
            "[Calibration] keys and values of a layer must have the same VecInfer preset or none, "
            f"but got {key} and {value}."
        )


def _smooth(shape: ModelShape, arrays: dict[str, mx.array], at: int) -> mx.array:
    smooth = _checked(arrays, at, _LAYER[0], (shape.kv_heads, shape.key_dim))
    if not (smooth > 0).all():
        raise ValueError(f"{_LAYER[0]} must be positive, but its least value is {smooth.min()}")
    return smooth


def _query_aware(name: str, shape: ModelShape, arrays: dict[str, mx.array], at: int) -> Codec:
    """The codec of a layer's keys."""
    query_aware.check_width(name, shape.key_dim)
    return query_aware.key_codec(name, _smooth(shape, arrays, at))


def _fitted(name: str, shape: ModelShape, arrays: dict[str, mx.array], at: int) -> LayerCodecs:
    """VecInfer's codecs of a layer."""
    smooth = _smooth(shape, arrays, at)
    spec = vecinfer.PRESETS[name]
    heads, rows = shape.kv_heads if spec.per_head else 1, 1 << spec.codebook_bits
    books = [
        _checked(arrays, at, book, (heads, 1, rows, dims))
        for book, dims in zip(_LAYER[1:], (spec.key_dims, spec.value_dims), strict=True)
    ]
    return LayerCodecs(
        *vecinfer.build(spec, smooth, books[0], books[1], shape.key_dim, shape.value_dim)
    )


def _checked(
    arrays: dict[str, mx.array], layer: int, name: str, shape: tuple[int, ...]
) -> mx.array:
    x = arrays[f"layers.{layer}.{name}"]
    if x.shape != shape or not mx.isfinite(x).all():
        raise ValueError(f"{name} must be finite of shape {shape}, but got shape {x.shape}")
    return x
