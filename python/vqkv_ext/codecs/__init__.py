"""Codecs: how keys and values are coded."""

from .base import Codec
from .calibration import Calibration, LayerCodecs
from .product import ProductCodec

__all__ = ["Calibration", "Codec", "LayerCodecs", "ProductCodec"]
