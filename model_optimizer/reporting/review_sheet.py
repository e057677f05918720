"""A blinded review as one self-contained page: reviewers choose between left and right and save their choices to a file.

What stands on which side is in the key alone; no name of an engine gets into the page.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from model_optimizer.reporting.side_by_side import answers_style, answers_template
from model_optimizer.verification.golden_review import CRITERIA, PairedAnswer, ReviewKey


@dataclass(frozen=True, slots=True)
class _Blinded:
    """One item as a reviewer sees it."""

    item: str
    prompt: str
    references: tuple[str, ...]
    left: str
    right: str


def render_review_sheet(answers: Sequence[PairedAnswer], key: ReviewKey) -> bytes:
    """Return the page."""
    blinded = [
        _Blinded(
            answer.item,
            answer.prompt,
            answer.references,
            *(
                (answer.candidate, answer.baseline)
                if key.candidate_side[answer.item] == "left"
                else (answer.baseline, answer.candidate)
            ),
        )
        for answer in answers
    ]
    page = answers_template("review_sheet.html.j2").render(
        style=answers_style(), answers=blinded, sheet=key.sheet, criteria=CRITERIA
    )
    return page.encode()
