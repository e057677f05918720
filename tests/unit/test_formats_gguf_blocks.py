"""Block types against the `gguf` library's reading, its own rounding, the plain search, and llama.cpp where it is at hand."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from gguf_fixtures import LlamaCpp, provide_llama_cpp  # noqa: F401  (a fixture)
from numpy.typing import NDArray

from model_optimizer.errors import UnsupportedError
from model_optimizer.formats.gguf.affine import pack_six_bits, unpack_six_bits
from model_optimizer.formats.gguf.base import Floats
from model_optimizer.formats.gguf.registry import BLOCKS

RNG = np.random.default_rng(0)
PLAIN = {"Q4_K": 15, "Q5_K": 31, "Q6_K": 32}


def awkward() -> Floats:
    """Rows of 512: normal, heavy tails, zeros, one constant each side, one outlier, positive only, tiny, large."""
    rows = RNG.normal(size=(9, 512)).astype(np.float32) * 0.05
    rows[1] = RNG.standard_t(2, size=512) * 0.02
    rows[2], rows[3], rows[4] = 0, 0.125, -0.125
    rows[5, 100] = 8.0
    rows[6] = np.abs(rows[6])
    rows[7], rows[8] = rows[7] * 1e-6, rows[8] * 1e4
    return rows


WEIGHT = awkward()
HEAVY = (RNG.standard_t(4, size=(64, 512)) * 0.02).astype(np.float32)
IMPORTANCE = RNG.lognormal(sigma=1.5, size=512).astype(np.float32)


@pytest.mark.parametrize("name", BLOCKS.names())
@pytest.mark.parametrize("importance", [None, IMPORTANCE], ids=["alike", "weighed"])
def test_dequantize_equals_the_library_exactly(name: str, importance: Floats | None) -> None:
    block = BLOCKS.get(name)
    stored = block.quantize(WEIGHT, importance)
    assert stored.shape == (9, block.row_bytes(512)) and stored.dtype == np.uint8
    assert np.array_equal(block.dequantize(stored), dequantize(stored, GGMLQuantizationType(block.number)))


@pytest.mark.parametrize("name", ["F32", "F16", "Q8_0", "Q4_0", "Q5_0"])
def test_quantize_gives_the_library_s_bytes(name: str) -> None:
    block = BLOCKS.get(name)
    for weight in (WEIGHT, HEAVY):
        expected = quantize(weight, GGMLQuantizationType(block.number)).view(np.uint8).reshape(len(weight), -1)
        assert np.array_equal(block.quantize(weight), expected)


@pytest.mark.parametrize(("name", "step"), [("Q4_K", 1 / 15), ("Q5_K", 1 / 31), ("Q6_K", 1 / 62)])
def test_quantize_errs_by_at_most_a_step_of_its_sub_block(name: str, step: float) -> None:
    block = BLOCKS.get(name)
    missed = np.abs(block.dequantize(block.quantize(HEAVY)) - HEAVY).reshape(64, -1, 32)
    span = np.ptp(np.concatenate([HEAVY, -HEAVY] if name == "Q6_K" else [HEAVY, HEAVY * 0]).reshape(2, 64, -1, 32), axis=(0, 3))
    assert (missed.max(-1) <= 1.2 * step * span + 1e-3).all()
    for row, value in ((2, 0.0), (3, 0.125), (4, -0.125)):
        assert block.dequantize(block.quantize(WEIGHT[row : row + 1])) == pytest.approx(value, abs=0.003)


def plain_round_trip(name: str, weight: Floats) -> NDArray[np.float64]:
    """Return the weights on grids spanned by the extremes of each sub-block, with exact scales: no 6-bit or float16 loss."""
    top = PLAIN[name]
    groups = weight.astype(np.float64).reshape(-1, 16 if name == "Q6_K" else 32)
    if name == "Q6_K":
        scale = np.abs(groups).max(1, keepdims=True) / (top - 1)
        return (np.clip(np.rint(groups / scale), -top, top - 1) * scale).reshape(weight.shape)
    low = np.minimum(groups.min(1, keepdims=True), 0)
    scale = (groups.max(1, keepdims=True) - low) / top
    return (np.rint((groups - low) / scale) * scale + low).reshape(weight.shape)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("importance", [None, IMPORTANCE], ids=["alike", "weighed"])
def test_quantize_is_better_than_spanning_the_extremes(name: str, importance: Floats | None) -> None:
    block = BLOCKS.get(name)
    weights = np.ones(512) if importance is None else importance
    searched = (weights * (block.dequantize(block.quantize(HEAVY, importance)) - HEAVY) ** 2).sum()
    plain = (weights * (plain_round_trip(name, HEAVY) - HEAVY) ** 2).sum()
    assert searched < {"Q4_K": 0.9, "Q5_K": 0.95, "Q6_K": 0.97}[name] * plain


@pytest.mark.parametrize("name", ["Q4_0", "Q5_0", "Q4_K", "Q6_K"])
def test_quantize_serves_what_matters_when_importance_says_so(name: str) -> None:
    block = BLOCKS.get(name)
    alike, weighed = (
        (IMPORTANCE * (block.dequantize(block.quantize(HEAVY, it)) - HEAVY) ** 2).sum() for it in (None, IMPORTANCE)
    )
    assert weighed < 0.97 * alike


@pytest.mark.parametrize("name", PLAIN)
def test_quantize_is_no_worse_than_llama_cpp(name: str, llama_cpp: LlamaCpp) -> None:
    block = BLOCKS.get(name)
    theirs = llama_cpp.quantize(block.number, HEAVY, HEAVY.shape[0] * block.row_bytes(512))
    errors = [((block.dequantize(stored) - HEAVY) ** 2).sum() for stored in (block.quantize(HEAVY), theirs)]
    assert errors[0] <= errors[1]


def test_quantize_gives_the_same_bytes_in_pieces() -> None:
    rows = RNG.normal(size=(600, 256)).astype(np.float32)  # three pieces
    block = BLOCKS.get("Q4_K")
    assert np.array_equal(block.quantize(rows), np.concatenate([block.quantize(part) for part in np.array_split(rows, 7)]))


def test_six_bits_come_back() -> None:
    s, m = RNG.integers(0, 64, (50, 8)).astype(np.uint8), RNG.integers(0, 64, (50, 8)).astype(np.uint8)
    packed = pack_six_bits(s, m)
    assert packed.shape == (50, 12)
    assert all(np.array_equal(left, right) for left, right in zip(unpack_six_bits(packed), (s, m), strict=True))


def test_quantize_refuses_a_width_or_a_value_that_does_not_fit() -> None:
    with pytest.raises(UnsupportedError, match=r"Q4_K: row width 576 is not divisible by 256 \(remainder 64\)"):
        BLOCKS.get("Q4_K").quantize(np.zeros((1, 576), dtype=np.float32))
    with pytest.raises(UnsupportedError, match="Q8_0: a weight is not finite"):
        BLOCKS.get("Q8_0").quantize(np.full((1, 32), np.nan, dtype=np.float32))
