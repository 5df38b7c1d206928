"""The sizes of the reference workload and its FLOPs. Without torch, so that reports are made where there is none."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder."""

    hidden: int
    layers: int
    ffn: int
    heads: int
    vocab: int

    @property
    def params(self) -> int:
        block = 4 * self.hidden**2 + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.layers * block + 2 * self.vocab * self.hidden + self.hidden

    def flops(self, batch: int, seq: int) -> float:
        """Model FLOPs of one rank's step: 6 per weight and token, and causal attention; recomputation is not counted."""
        dense = self.layers * (4 * self.hidden**2 + 3 * self.hidden * self.ffn) + self.vocab * self.hidden
        return 6.0 * dense * batch * seq + 6.0 * self.layers * self.hidden * seq * seq * batch


SHAPES = {
    "tiny": Shape(64, 2, 176, 4, 512),
    "50m": Shape(512, 8, 1408, 8, 16000),
    "125m": Shape(768, 12, 2048, 12, 32000),
    "350m": Shape(1024, 24, 2816, 16, 32000),
    "1b": Shape(2048, 22, 5632, 16, 32000),
    "3b": Shape(3200, 26, 8640, 32, 32000),
    "7b": Shape(4096, 32, 11008, 32, 32000),
    "13b": Shape(5120, 40, 13824, 40, 32000),
    "20b": Shape(6144, 44, 16384, 48, 32000),
    "25b": Shape(6656, 46, 17920, 52, 32000),
    "30b": Shape(6656, 60, 17920, 52, 32000),
    "40b": Shape(8192, 49, 22016, 64, 32000),
}
