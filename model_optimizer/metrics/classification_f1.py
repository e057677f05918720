"""Macro F1 of labels: the mean over classes, so that a rare class counts as much as a common one."""

import numpy as np
from numpy.typing import NDArray

from model_optimizer.errors import ConfigError
from model_optimizer.metrics.registry import METRICS, Answers, Metric, Statistic


def label_of(text: str) -> str:
    """Return the label that an answer states: its first line that is not empty, case and full stops put aside."""
    return next((line.strip().strip(".。\"'").strip().casefold() for line in text.splitlines() if line.strip()), "")


def classification_f1(answers: Answers) -> Statistic:
    """Return the macro F1 over the classes that the references name.

    An answer that is none of them is a miss of its class and an alarm of no other. A class that a resample lacks counts
    0 there if it was predicted and is left out if not.
    """
    truth = [label_of(references[0]) for references in answers.references_N]
    given = [label_of(output) for output in answers.outputs_N]
    classes = sorted(set(truth))
    gold_NC, given_NC = _one_hot(truth, classes), _one_hot(given, classes)
    hits_NC = gold_NC * given_NC

    def weighted(weights_BN: NDArray[np.float64]) -> NDArray[np.float64]:
        sizes_BC = weights_BN @ (gold_NC + given_NC)
        f1_BC = np.divide(2 * (weights_BN @ hits_NC), sizes_BC, out=np.zeros_like(sizes_BC), where=sizes_BC > 0)
        return np.asarray(f1_BC.sum(axis=1) / np.maximum(1, (sizes_BC > 0).sum(axis=1)), dtype=np.float64)

    return Statistic(hits_NC.sum(axis=1), weighted)


def _one_hot(labels: list[str], classes: list[str]) -> NDArray[np.float64]:
    return np.array([[float(label == name) for name in classes] for label in labels])


def _check(references: tuple[str, ...]) -> None:
    if len(references) != 1 or not label_of(references[0]):
        raise ConfigError(f"a class needs exactly one label; seen: {list(references)}")


def _example(seed: int) -> Answers:
    generator = np.random.default_rng(seed)
    names = ("refund", "delivery", "other")
    truth, given = generator.integers(0, 3, 30), generator.integers(0, 3, 30)
    return Answers(tuple(names[index] for index in given), tuple((names[index],) for index in truth))


METRICS.register("classification_f1")(
    Metric[Answers](
        unit="ratio",
        higher_is_better=True,
        lower_bound=0.0,
        upper_bound=1.0,
        compute=lambda answers: classification_f1(answers).value,
        example=_example,
        statistic=classification_f1,
        check=_check,
    )
)
