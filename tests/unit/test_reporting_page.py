"""The page as people and machines meet it: well formed, self-contained, reachable by keyboard, readable in every theme."""

import itertools
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable

import pytest
from reporting_fixtures import Page, accepted_after_repair, crowded_report, make_report, rejected_after_repair

from model_optimizer.artifacts.measure import Verdict
from model_optimizer.artifacts.report import Report
from model_optimizer.reporting.formats.html import TEMPLATES, render_html
from model_optimizer.reporting.svg import WIDTH, text_width

REPORTS: dict[str, Callable[[], Report]] = {
    "accept": make_report,
    "undecided": lambda: make_report(Verdict.INCONCLUSIVE),
    "repaired": accepted_after_repair,
    "rejected": rejected_after_repair,
    "crowded": crowded_report,
}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module", params=REPORTS)
def html(request: pytest.FixtureRequest) -> str:
    return render_html(REPORTS[request.param]()).decode()


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return read(html)


@pytest.fixture(scope="module")
def pictures(html: str) -> dict[str, ElementTree.Element]:
    return pictures_of(html)


def read(html: str) -> Page:
    page = Page()
    page.feed(html)
    return page


def pictures_of(html: str) -> dict[str, ElementTree.Element]:
    """Return the page's pictures by name, read as XML."""
    found = [ElementTree.fromstring(text) for text in re.findall(r"<svg .*?</svg>", html, re.DOTALL)]
    return {str(picture.get("aria-labelledby")).split("-")[0]: picture for picture in found}


def test_render_html_is_well_formed_and_asks_for_nothing(page: Page) -> None:
    assert page.open == []
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "base", "form"}
    places = [attrs[name] for _, attrs in page.tags for name in ("src", "href", "xlink:href", "action") if name in attrs]
    assert places and all(place is not None and place.startswith("#") for place in places)
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    style = (TEMPLATES / "report.css").read_text()
    assert "url(" not in style and "@import" not in style


def test_render_html_links_lead_to_places_on_the_page(page: Page) -> None:
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {str(attrs["href"])[1:] for tag, attrs in page.tags if tag == "a"} <= set(ids)
    labelled = {part for _, attrs in page.tags for part in (attrs.get("aria-labelledby") or "").split()}
    assert labelled <= set(ids)


def test_render_html_headings_rise_by_one(page: Page) -> None:
    headings = page.headings
    assert headings[0] == 1 and headings.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(headings))


def test_render_html_tables_have_captions_and_scopes_and_pictures_have_words() -> None:
    page = read(render_html(make_report()).decode())
    tags = [tag for tag, _ in page.tags]
    assert tags.count("caption") == tags.count("table") >= 10
    assert all("scope" in attrs for tag, attrs in page.tags if tag == "th")
    drawn = [attrs for tag, attrs in page.tags if tag == "svg"]
    assert len(drawn) == tags.count("desc") == 5 and all(attrs["role"] == "img" for attrs in drawn)


def test_render_html_scrolls_by_keyboard_and_names_what_scrolls(page: Page) -> None:
    places = [attrs for _, attrs in page.tags if attrs.get("class") == "scroll"]
    assert len(places) >= 14
    assert all((place.get("tabindex"), place.get("role")) == ("0", "region") for place in places)
    names = [place["aria-label"] for place in places]
    assert all(names) and len(names) == len(set(names))


def test_render_html_numbers_carry_their_column_for_narrow_windows(page: Page) -> None:
    numbers = [attrs for tag, attrs in page.tags if tag == "td" and str(attrs.get("class")).split()[0] == "num"]
    assert len(numbers) > 100
    assert all(attrs.get("data-label") or "answer" in str(attrs["class"]) for attrs in numbers)


def test_pictures_have_title_and_description_and_stay_on_their_canvas(pictures: dict[str, ElementTree.Element]) -> None:
    for name, picture in pictures.items():
        assert picture[0].tag == f"{SVG}title" and picture[0].text
        assert picture[1].tag == f"{SVG}desc" and picture[1].text
        height = float(str(picture.get("viewBox")).split()[3])
        for text in picture.iter(f"{SVG}text"):
            left, right = extent(text)
            assert left >= 0 and right <= WIDTH + 1, (name, text.text)
            assert 0 < float(text.get("y", 0)) <= height, (name, text.text)
        for box in picture.iter(f"{SVG}rect"):
            assert float(box.get("x", 0)) + float(box.get("width", 0)) <= WIDTH, name
            assert float(box.get("y", 0)) + float(box.get("height", 0)) <= height, name
        for line in picture.iter(f"{SVG}line"):
            assert all(0 <= float(line.get(end, 0)) <= WIDTH for end in ("x1", "x2")), name


def extent(text: ElementTree.Element) -> tuple[float, float]:
    """Return where a text begins and ends; ticks are set smaller than labels."""
    width = text_width(text.text or "") * (12 / 13 if "tick" in str(text.get("class")) else 1)
    x = float(text.get("x", 0))
    left = {"start": x, "middle": x - width / 2, "end": x - width}[str(text.get("text-anchor"))]
    return left, left + width


@pytest.mark.parametrize("name", ["pareto", "golden", "latency", "rounds", "layers"])
def test_labels_of_a_picture_do_not_collide(pictures: dict[str, ElementTree.Element], name: str) -> None:
    found = pictures.get(name)
    texts = [] if found is None else [(extent(text), float(text.get("y", 0)), text.text) for text in found.iter(f"{SVG}text")]
    for (a, y, one), (b, z, other) in itertools.combinations(texts, 2):
        assert abs(y - z) >= 12 or a[1] <= b[0] or b[1] <= a[0], (one, other)


def test_pareto_picture_numbers_the_points_that_have_no_room_for_a_name() -> None:
    report = crowded_report()
    words = [
        text.text
        for text in pictures_of(render_html(report).decode())["pareto"].iter(f"{SVG}text")
        if "label" in str(text.get("class"))
    ]
    labels = [row.strategy.label for row in report.front.candidates]
    assert "int8-channel-rtn/onnxruntime" in words
    numbers = [int(str(word)) for word in words if str(word).isdigit()]
    assert len(numbers) >= 5 and all(len(labels[number - 1]) > 40 for number in numbers)


def test_render_html_marks_what_was_not_measured() -> None:
    words = " ".join(read(render_html(make_report()).decode()).words)
    for mark in ("predicted", "simulated", "not measured", "this machine exposes no energy counter"):
        assert mark in words


def luminance(colour: str) -> float:
    """Source: WCAG 2.2, relative luminance."""
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


THEMES = pytest.mark.parametrize("theme", [0, 1, 2], ids=["light", "dark", "print"])


def palette(theme: int) -> dict[str, str]:
    block = re.findall(r":root \{(.*?)\}", (TEMPLATES / "report.css").read_text(), re.DOTALL)[theme]
    colours = re.findall(r"--([\w-]+): (#[0-9a-f]{3,6})\b", block)
    return {name: value if len(value) == 7 else "#" + "".join(2 * digit for digit in value[1:]) for name, value in colours}


@THEMES
@pytest.mark.parametrize("ground", ["paper", "raised"])
@pytest.mark.parametrize("name", ["ink", "muted", "accent", "accept", "reject", "inconclusive"])
def test_text_colours_have_enough_contrast(theme: int, ground: str, name: str) -> None:
    assert contrast(palette(theme)[name], palette(theme)[ground]) >= 4.5


@THEMES
@pytest.mark.parametrize("name", ["accent", "muted", "reject", "s3", "s4"])
def test_marks_have_enough_contrast(theme: int, name: str) -> None:
    assert contrast(palette(theme)[name], palette(theme)["paper"]) >= 3


@THEMES
def test_shades_grow_evenly_away_from_the_paper(theme: int) -> None:
    steps = [contrast(palette(theme)[f"s{shade}"], palette(theme)["paper"]) for shade in range(5)]
    assert all(after > 1.2 * before for before, after in itertools.pairwise(steps))


def test_page_is_whole_on_paper() -> None:
    printed = (TEMPLATES / "report.css").read_text().partition("@media print")[2]
    assert "details::details-content { content-visibility: visible" in printed
    assert "overflow: visible" in printed
