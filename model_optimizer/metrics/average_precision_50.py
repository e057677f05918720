"""AP@0.5 of a detector over its prediction file: mean over classes of the area under precision and recall.

Shape letters: N images, D detections of a class over all images, best first, B resamples.
"""

import json
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter

from model_optimizer.artifacts.base import Frozen
from model_optimizer.metrics.json_answers import read_output, read_references
from model_optimizer.metrics.registry import METRICS, Answers, Metric, Statistic

MIN_OVERLAP = 0.5
Corners = tuple[float, float, float, float]
"""Left, top, right, bottom."""


class Box(Frozen):
    """An object that stands in an image; `ignore` where it counts neither way, e.g. the large ones of a small-object set."""

    label: str
    box: Corners
    ignore: bool = False


class Detection(Frozen):
    """A box that a detector claims."""

    label: str
    box: Corners
    score: float = Field(allow_inf_nan=False)


BOXES, DETECTIONS = TypeAdapter(list[Box]), TypeAdapter(list[Detection])


@dataclass(frozen=True, slots=True)
class _Class:
    """One class over all images."""

    image_D: NDArray[np.int64]
    is_hit_D: NDArray[np.bool_]
    num_objects_N: NDArray[np.float64]


def overlap_ratio(first: Corners, second: Corners) -> float:
    """Return intersection over union of two boxes."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    shared = max(0.0, width) * max(0.0, height)
    areas = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (first, second))
    return shared / (areas - shared) if areas > shared else 0.0


def average_precision_50(answers: Answers) -> Statistic:
    """Return AP@0.5, each image an item.

    A detection, best score first, takes the free object of its class that it overlaps most, by half or more; one that finds
    only ignored objects counts neither way. The area is taken under the precision made monotone, at every recall.

    Source: Everingham et al., PASCAL VOC 2010 development kit, section 3.4.1; matching to free objects as in COCO.
    """
    images = [read_references(references, BOXES, _ALLOWED) for references in answers.references_N]
    claims = [read_output(output, DETECTIONS) for output in answers.outputs_N]
    labels = sorted({box.label for boxes in images for box in boxes if not box.ignore})
    classes = [_match(label, images, claims) for label in labels]

    def weighted(weights_BN: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.array([_mean_area(classes, weights_N) for weights_N in weights_BN], np.float64)

    return Statistic(np.full(len(images), np.nan), weighted)


def _match(label: str, images: list[list[Box]], claims: list[list[Detection]]) -> _Class:
    found = list[tuple[float, int, bool]]()
    for image, (boxes, detections) in enumerate(zip(images, claims, strict=True)):
        free = [box for box in boxes if box.label == label]
        for detection in sorted((it for it in detections if it.label == label), key=lambda it: -it.score):
            scored = [(overlap_ratio(box.box, detection.box), not box.ignore, -at) for at, box in enumerate(free)]
            near = [it for it in scored if it[0] >= MIN_OVERLAP]
            if not near:
                found.append((detection.score, image, False))
                continue
            _, wanted, at = max(near, key=lambda it: (it[1], it[0], it[2]))
            if wanted:
                del free[-at]
                found.append((detection.score, image, True))
    found.sort(key=lambda it: (-it[0], it[1]))
    num_objects = [sum(box.label == label and not box.ignore for box in boxes) for boxes in images]
    return _Class(
        np.array([image for _, image, _ in found], np.int64),
        np.array([hit for _, _, hit in found], np.bool_),
        np.array(num_objects, np.float64),
    )


def _mean_area(classes: list[_Class], weights_N: NDArray[np.float64]) -> float:
    areas = [_area(found, weights_N) for found in classes if weights_N @ found.num_objects_N > 0]
    return sum(areas) / len(areas) if areas else 0.0


def _area(found: _Class, weights_N: NDArray[np.float64]) -> float:
    weights_D = weights_N[found.image_D]
    hits_D = np.cumsum(weights_D * found.is_hit_D)
    precision_D = hits_D / np.maximum(np.cumsum(weights_D), 1e-12)
    ceiling_D = np.maximum.accumulate(precision_D[::-1])[::-1]
    gains_D = np.diff(hits_D, prepend=0.0) / (weights_N @ found.num_objects_N)
    return float((gains_D * ceiling_D).sum())


_ALLOWED = '{"label": "car", "box": [left, top, right, bottom]}'


def _check(references: tuple[str, ...]) -> None:
    read_references(references, BOXES, _ALLOWED)


def _example(seed: int) -> Answers:
    generator = np.random.default_rng(seed)
    outputs, references = list[str](), list[tuple[str, ...]]()
    for _ in range(15):
        corners = generator.uniform(0, 80, (3, 2))
        boxes = [[float(x), float(y), float(x + 20), float(y + 20)] for x, y in corners]
        shifted = [[value + float(generator.normal(0, 4)) for value in box] for box in boxes]
        references.append(tuple(json.dumps({"label": "car", "box": box}) for box in boxes))
        scored = [{"label": "car", "box": box, "score": float(generator.uniform())} for box in shifted]
        outputs.append(json.dumps(scored))
    return Answers(tuple(outputs), tuple(references))


METRICS.register("average_precision_50")(
    Metric[Answers](
        unit="ratio",
        higher_is_better=True,
        lower_bound=0.0,
        upper_bound=1.0,
        compute=lambda answers: average_precision_50(answers).value,
        example=_example,
        statistic=average_precision_50,
        reads_json=True,
        needs_reference=False,
        from_predictions=True,
        check=_check,
    )
)
