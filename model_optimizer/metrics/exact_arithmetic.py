"""Share of worked problems whose last number is right, whatever was written before it: GSM8K's measure."""

import re
from decimal import Decimal

import numpy as np

from model_optimizer.errors import ConfigError
from model_optimizer.metrics.registry import METRICS, Answers, Metric, Statistic, mean_statistic
from model_optimizer.metrics.words import example_answers

_NUMBER = re.compile(r"(?<![\d.,])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\d)|(?<!\d)-?\.\d+")
"""Digits, with or without commas between thousands, and decimals; a full stop behind is no part of it."""


def last_number(text: str) -> Decimal | None:
    """Return the last number that stands in a text: `$1,250.00.` gives 1250; None where there is none.

    A minus sign directly behind a digit or a bracket is an operator: `16-3` ends in 3.
    """
    found = list(_NUMBER.finditer(text.replace("−", "-")))
    if not found:
        return None
    last = found[-1]
    stated = last.group().replace(",", "")
    before = text[: last.start()].rstrip()[-1:]
    return Decimal(stated.removeprefix("-") if before.isdigit() or before in (")", "]") else stated)


def exact_arithmetic(answers: Answers) -> Statistic:
    """Return 1 for every output whose last number equals the last number of a reference, else 0.

    Source: Cobbe et al., Training verifiers to solve math word problems, 2021: only the final answer counts.
    """
    return mean_statistic(
        np.array(
            [
                float((found := last_number(output)) is not None and found in {last_number(text) for text in references})
                for output, references in zip(answers.outputs_N, answers.references_N, strict=True)
            ]
        )
    )


def _check(references: tuple[str, ...]) -> None:
    for reference in references:
        if last_number(reference) is None:
            raise ConfigError(f"reference {reference[-60:]!r} holds no number; exact_arithmetic compares last numbers")


METRICS.register("exact_arithmetic")(
    Metric[Answers](
        unit="ratio",
        higher_is_better=True,
        lower_bound=0.0,
        upper_bound=1.0,
        compute=lambda answers: exact_arithmetic(answers).value,
        example=lambda seed: Answers(*example_answers(seed)),
        statistic=exact_arithmetic,
        is_binary=True,
        check=_check,
    )
)
