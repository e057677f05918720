"""What a candidate will cost before it runs, and which ones need not run at all.

A decode step streams every resident weight once and each stream's cache once, or it is limited by arithmetic,
whichever takes longer (roofline). What a runtime keeps resident per weight is its own: torch unpacks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from model_optimizer.artifacts.front import Prediction
from model_optimizer.artifacts.strategy import Strategy
from model_optimizer.artifacts.target import DeviceFacts, ModelFacts

SPEED_ERROR_RATIO = 0.25
"""A predicted speed-up below this may be noise of the predictor.
Source: decode rates of SmolLM2-135M on 2 AVX2 cores against the roofline; the scan writes its own error beside it."""
MEMORY_ERROR_RATIO = 0.05
"""As `SPEED_ERROR_RATIO`, for resident bytes, which are nearly arithmetic."""
