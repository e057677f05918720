"""Answers of both engines beside each other, as one self-contained page."""

from collections.abc import Sequence

import jinja2
from markupsafe import Markup

from model_optimizer.paths import PACKAGE_ROOT
from model_optimizer.verification.golden_review import PairedAnswer, sample_answers

TEMPLATES = PACKAGE_ROOT / "reporting" / "templates"


def render_side_by_side(answers: Sequence[PairedAnswer], names: tuple[str, str], num: int, seed: int) -> bytes:
    """Return a page with `num` items, those whose answers changed first; `names` are the baseline's and the candidate's."""
    shown = sample_answers(answers, num, seed, changed_first=True)
    page = answers_template("side_by_side.html.j2").render(
        style=answers_style(),
        answers=shown,
        num_answers=len(answers),
        num_changed=sum(answer.baseline != answer.candidate for answer in answers),
        baseline=names[0],
        candidate=names[1],
        seed=seed,
        mark=_mark,
    )
    return page.encode()


def answers_template(name: str) -> jinja2.Template:
    """Return a page's template; every text put into it is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def answers_style() -> Markup:
    """Return the report's style with what pages of answers add."""
    return page_style("answers.css")


def page_style(name: str) -> Markup:
    """Return the report's style with what one kind of page adds."""
    return Markup("".join((TEMPLATES / it).read_text(encoding="utf-8") for it in ("report.css", name)))  # our files


def _mark(difference: float | None) -> str:
    if not difference:
        return ""
    return " · better by the metric" if difference > 0 else " · worse by the metric"
