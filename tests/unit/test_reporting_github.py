"""What is told on GitHub: within its limits, readable where it was cut, on the right line; no word of a model is a command."""

import re
from pathlib import Path

import pytest
from report_fixtures import results
from reporting_fixtures import make_report, repair_rounds, replaced

from model_optimizer.artifacts.measure import Dimension, Measure, Verdict
from model_optimizer.artifacts.report import Report
from model_optimizer.profile import DeploymentProfile
from model_optimizer.reporting.annotations import (
    LIMIT_FIELDS,
    MOST_PER_LEVEL,
    Annotation,
    commands,
    gate_annotations,
    limit_field,
)
from model_optimizer.reporting.fit import fit
from model_optimizer.reporting.formats.github import (
    COMMENT_LIMIT_BYTES,
    STEP_ROOM_BYTES,
    SUMMARY_LIMIT_BYTES,
    gate_cells,
    neutral,
    render_comment,
    render_github,
)
from model_optimizer.yaml_file import read_yaml

MARKER = "<!-- model-optimizer 0123456789abcdef -->"
HOSTILE = (
    "evil\r\n::error file=x::boo\n::set-output name=verdict::ACCEPT ##[add-mask]a %0A::warning::b, @octocat/team "
    "https://evil.test/x www.evil.test </details></table><script>| `x` ``` \u202e txt.exe \x1b[31m \x00 漢字"
)
NUM_GATES = NUM_LAYERS = 10_000


@pytest.fixture(scope="module")
def huge() -> Report:
    """A report of 10,000 gates, the last one rejected, 10,000 layers, and hostile names wherever a name may stand."""
    found = results(Verdict.REJECT)
    gates = tuple(
        Measure(
            name=f"p95_latency_{index}",
            dimension=Dimension.SPEED,
            unit="ms",
            value=1.0,
            limit=2.0,
            verdict=Verdict.ACCEPT if index < NUM_GATES - 1 else Verdict.REJECT,
            reason=f"{HOSTILE} {index}",
        )
        for index in range(NUM_GATES)
    )
    plan = tuple(found.quantized.plan[0].model_copy(update={"layer": f"{HOSTILE}.{index}"}) for index in range(NUM_LAYERS))
    quantized = found.quantized.model_copy(update={"plan": plan, "warnings": (HOSTILE,) * 200})
    verification = found.verification.model_copy(update={"measures": (*found.verification.measures, *gates)})
    report = make_report(found=replaced(found, quantized=quantized, verification=verification), rounds=repair_rounds(NUM_LAYERS))
    return report.model_copy(update={"name": HOSTILE, "model_ref": HOSTILE})


@pytest.fixture(scope="module")
def texts(huge: Report) -> tuple[str, str]:
    """The huge report's summary and comment."""
    return render_github(huge).decode(), render_comment(huge, ("[run](https://github.test/1)",), MARKER).decode()


def assert_reads_well(text: str) -> None:
    """Every fold and fence is closed, and no table has a head alone or a row with other columns than its head."""
    assert text.count("<details>") == text.count("</details>") == len(re.findall("^ *(?:\n)?<details>", text, re.MULTILINE))
    assert sum(line.startswith("```") for line in text.splitlines()) % 2 == 0
    for block in re.split(r"\n(?!\|)", text):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        if rows:
            assert len(rows) > 2 and set(rows[1]) == set("| -"), rows[:3]
            assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
            assert all(row.endswith(" |") for row in rows)


def parsed(log: str) -> list[tuple[str, dict[str, str], str]]:
    """Return what GitHub's runner makes of a log: every line that begins with `::NAME` is a command."""
    found = []
    for line in re.split("\r\n|\r|\n", log):
        if command := re.match(r"\s*::([\w-]+)(?: (.*?))?::(.*)", line):
            pairs = (pair.partition("=") for pair in (command[2] or "").split(",") if pair)
            found.append((command[1], {name: _unescaped(value) for name, _, value in pairs}, _unescaped(command[3])))
        else:
            assert "##[" not in line, "the older form of a command"
    return found


def _unescaped(text: str) -> str:
    for code, character in (("%3A", ":"), ("%2C", ","), ("%0D", "\r"), ("%0A", "\n"), ("%25", "%")):
        text = text.replace(code, character)
    return text


def test_summary_and_comment_of_ten_thousand_gates_fit_and_read_well(texts: tuple[str, str]) -> None:
    summary, comment = texts
    assert len(comment.encode()) <= COMMENT_LIMIT_BYTES == 65_536 < len(comment.encode()) + 1_000
    assert len(summary.encode()) <= SUMMARY_LIMIT_BYTES - STEP_ROOM_BYTES < SUMMARY_LIMIT_BYTES == 2**20
    for text in (summary, comment):
        assert_reads_well(text)
        assert re.search(r"_The rest is left out here \(\d[\d,]+ lines, [\d.]+ [kM]B\)", text)
        assert "p95 latency 9999" in text[: text.index("ACCEPT |")], "what failed comes first"


def test_comment_opens_with_marker_verdict_headline_and_notes(texts: tuple[str, str]) -> None:
    lines = texts[1].split("\n\n")
    assert lines[0] == MARKER and lines[1].startswith("## ✘ REJECT: evil ::error") and lines[3] == "[run](https://github.test/1)"


def test_comment_of_a_plain_report_is_whole() -> None:
    report = make_report(Verdict.INCONCLUSIVE)
    comment = render_comment(report, (), MARKER).decode()
    assert_reads_well(comment)
    assert "left out" not in comment
    assert len(gate_cells(report)) == sum(measure.verdict is not None for measure in report.measures)
    assert gate_cells(report)[0][-2] == "◐ INCONCLUSIVE"


def test_texts_of_a_model_notify_nobody_and_link_nowhere(texts: tuple[str, str]) -> None:
    for text in (it.replace("[run](https://github.test/1)", "") for it in texts):
        assert not re.search(r"@\w|https?://|www\.", text)
        assert not set(text) & {"\x1b", "\x00", "\r", "\u202e"}
        assert not re.search(r"(?<!\\)<(?!/?(details|summary)>|!-- model-optimizer)", text)
    assert neutral("a@b.c and https://x.y") == "a@\u200bb.c and https:\u200b//x.y"


@pytest.mark.parametrize("limit", range(150, 700, 7))
def test_fit_cuts_between_blocks_at_any_limit(limit: int) -> None:
    text = (
        "# Title\n\nwords\n\n| a | b |\n| --- | --- |\n"
        + "| 漢字 | 2 |\n" * 6
        + "\n## Code\n\n```\n| not | a table |\n<details>\n```\n\n"
        "<details><summary>more</summary>\n\n| c |\n| --- |\n" + "| 3 |\n" * 8 + "\n</details>\n\n## Last\n\n" + "- item\n" * 20
    )
    content = fit(text, limit, lambda lines, size: f"\n[{lines} lines, {size} bytes]\n")
    cut = content.decode()
    assert len(content) <= limit
    if len(text.encode()) <= limit:
        assert cut == text
        return
    told = re.search(r"\n\[(\d+) lines, (\d+) bytes\]\n\Z", cut)
    assert told
    kept = text.splitlines(keepends=True)[: text.count("\n") - int(told[1])]
    assert cut.startswith("".join(kept)) and len("".join(kept).encode()) == len(text.encode()) - int(told[2])
    assert sum(line == "```" for line in cut.splitlines()) % 2 == 0
    outside = cut if "```" not in cut else cut[: cut.index("```")] + cut[cut.rindex("```") :]
    assert outside.count("<details>") == outside.count("</details>")
    assert not kept or not re.match(r"#|\| ---|\n|\| [ac] \|", kept[-1])


def test_annotation_is_one_command_whatever_the_texts_hold() -> None:
    log = commands(
        [Annotation("error", HOSTILE, HOSTILE, f"{HOSTILE}.yaml", 3), Annotation("warning", "plain", "100 % of a, b: c")]
    )
    first, second = parsed(log)
    assert log.count("\n") == 2
    assert first[0] == "error" and set(first[1]) == {"file", "line", "title"} and first[1]["line"] == "3"
    assert first[2] == HOSTILE.replace("\u202e", "").replace("\x1b", "").replace("\x00", "")
    assert second == ("warning", {"title": "plain"}, "100 % of a, b: c")


def test_annotations_are_as_many_as_github_shows_and_count_the_rest() -> None:
    log = commands([Annotation("error", f"gate {index}", "failed") for index in range(10_000)])
    found = parsed(log)
    assert len(found) == MOST_PER_LEVEL
    assert found[-1][1]["title"] == "9,991 more"
    assert len(parsed(commands([Annotation("error", "gate", "failed")] * MOST_PER_LEVEL))) == MOST_PER_LEVEL


PROFILE = """\
# a comment
name: chat
sla:
  concurrency: 2

  accuracy_loss_ratio: 0.02
  p95_latency_ms: 500
verify: {golden_sets: [a],
  required_soak: 24h}
"""


@pytest.mark.parametrize(
    ("measure", "line"),
    [("golden_change", 6), ("golden_support_qa_hard_change", 6), ("p95_latency", 7), ("concurrency", 4), ("soak", 9),
     ("p95_ttft", 3), ("cost", 3), ("kl", 2), ("speed_ratio", 2)],
)  # fmt: skip
def test_gate_is_told_on_the_line_that_set_its_limit_else_of_its_section(measure: str, line: int, tmp_path: Path) -> None:
    (tmp_path / "chat.yaml").write_text(PROFILE)
    unit = "s" if measure == "soak" else "ms"
    failed = Measure(name=measure, dimension=Dimension.SPEED, unit=unit, value=9.0, limit=5.0, verdict=Verdict.REJECT)
    report = make_report().model_copy(update={"measures": (failed,)})
    (annotation,) = gate_annotations(report, "chat.yaml", read_yaml(tmp_path / "chat.yaml", "a profile").line)
    assert (annotation.level, annotation.file, annotation.line) == ("error", "chat.yaml", line)
    assert annotation.title == f"chat: {measure.replace('_', ' ')} failed"


def test_rejections_are_errors_and_come_before_undecided_gates() -> None:
    gates = [
        Measure(name=name, dimension=Dimension.SPEED, unit="ms", value=9.0, limit=5.0, verdict=verdict)
        for name, verdict in (
            ("p95_ttft", Verdict.INCONCLUSIVE),
            ("p95_latency", Verdict.REJECT),
            ("p50_latency", Verdict.ACCEPT),
        )
    ]
    found = gate_annotations(make_report().model_copy(update={"measures": tuple(gates)}), "chat.yaml", lambda _: 1)
    assert [(annotation.level, annotation.title) for annotation in found] == [
        ("error", "chat: p95 latency failed"),
        ("warning", "chat: p95 ttft is not decided"),
    ]
    assert found[0].message == "p95 latency is 9 ms; allowed at most 5 ms; set by sla.p95_latency_ms"


@pytest.mark.parametrize("field", sorted({*LIMIT_FIELDS.values(), limit_field("golden_change")}))
def test_limit_fields_are_fields_of_a_profile(field: tuple[str, ...]) -> None:
    section = DeploymentProfile.model_fields[field[0]].annotation
    assert isinstance(section, type) and field[1] in section.model_fields  # type: ignore[attr-defined]
