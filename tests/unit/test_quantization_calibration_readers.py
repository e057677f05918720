"""Every kind of calibration file gives the same records; fields are found by name, or named; faults say where."""

import codecs
import json
import sys
from pathlib import Path

import pytest

from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.quantization.calibration import CalibrationSource, check_calibration, prepare, texts
from model_optimizer.quantization.config import CalibrationConfig
from model_optimizer.quantization.reading import READERS
from model_optimizer.quantization.records import Message, Record, to_record
from model_optimizer.verification.golden import find_golden_set, load_golden_set
from model_optimizer.verification.leakage import refuse_leakage

STORIES = [
    "The heron stood in the reeds until noon.",
    "Nobody had counted the steps of the tower.",
    "雨停了以后，院子里的石板路亮得像一面镜子。",
]


def write_parquet(path: Path, **columns: list[object]) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def write_kind(folder: Path, kind: str, stories: list[str]) -> Path:
    path = folder / f"data.{kind}"
    records = [{"text": story} for story in stories]
    if kind == "parquet":
        return write_parquet(path, text=list(stories))
    content = {
        "json": json.dumps(records, indent=1, ensure_ascii=False),
        "jsonl": "\n".join(json.dumps(record) for record in records),
        "ndjson": "".join(json.dumps(record) + "\r\n" for record in records),
        "txt": "\n\n".join(stories) + "\n",
        "text": "\n".join(stories),
    }
    path.write_bytes(codecs.BOM_UTF8 + content[kind].encode())
    return path


def source(path: Path, **settings: object) -> CalibrationSource:
    return CalibrationSource.of(CalibrationConfig.model_validate({"path": path, **settings}), path.parent)


@pytest.mark.parametrize("kind", READERS.names())
def test_texts_are_the_same_whatever_the_kind_of_file(kind: str, tmp_path: Path) -> None:
    assert texts(source(write_kind(tmp_path, kind, STORIES))) == tuple(STORIES)


@pytest.mark.parametrize("kind", READERS.names())
def test_refuse_leakage_names_item_and_set_whatever_the_kind_of_file(kind: str, tmp_path: Path) -> None:
    golden = load_golden_set(find_golden_set("quickstart-en", tmp_path))
    item = golden.items[7]
    path = write_kind(tmp_path, kind, [*STORIES, f"Once more: {item.prompt}{item.choices[item.answer]}"])
    with pytest.raises(ConfigError, match=rf"text 4 .*{item.id!r}.*'quickstart-en'"):
        refuse_leakage(texts(source(path)), [golden])


@pytest.mark.parametrize("kind", ["json", "jsonl", "txt"])
def test_texts_refuse_other_encodings_with_the_byte_of_the_file(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"data.{kind}"
    head = codecs.BOM_UTF8 + b'{"text": "first"}\r\n{"text": "caf'
    path.write_bytes(head + b'\xe9"}\n')
    with pytest.raises(ConfigError, match=rf"not UTF-8 \(byte {len(head)}\); convert it"):
        texts(source(path))


def test_read_plain_text_keeps_paragraphs_and_puts_headings_before_them(tmp_path: Path) -> None:
    path = tmp_path / "wiki.txt"
    path.write_text(
        " \n = Heron = \n \n A long bird .\n It waits .\n \n = = Food = = \n \n = = = Fish = = = \n\n Small ones .\n \n"
    )
    assert list(READERS.get("txt")(path)) == [
        ("line 2", {"text": "= Heron =\nA long bird .\nIt waits ."}),
        ("line 7", {"text": "= = Food = =\n= = = Fish = = =\nSmall ones ."}),
    ]


def test_read_json_array_takes_lines_of_objects_and_refuses_one_object(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text('{"text": "one"}\n{"text": "two"}\n')
    assert [place for place, _ in READERS.get("json")(path)] == ["line 1", "line 2"]
    path.write_text('{\n "data": []\n}')
    with pytest.raises(ConfigError, match="holds dict, not an array"):
        list(READERS.get("json")(path))
    path.write_text('[{"text": "one"},\n{"text": tow}]')
    with pytest.raises(ConfigError, match=r"not JSON \(line 2: "):
        list(READERS.get("json")(path))


def test_read_parquet_refuses_a_cut_file(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "data.parquet", text=STORIES)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ConfigError, match="no whole Parquet file"):
        texts(source(path))


def test_read_parquet_names_the_package_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "data.parquet", text=STORIES)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UnsupportedError, match="pip install pyarrow"):
        texts(source(path))


def test_of_refuses_an_unknown_suffix(tmp_path: Path) -> None:
    (tmp_path / "data.xlsx").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"'\.xlsx'; known: \.json, \.jsonl, .*\.parquet"):
        source(tmp_path / "data.xlsx")


def test_of_tells_kinds_apart_that_share_their_bytes(tmp_path: Path) -> None:
    content = '{"text": "one and the same"}\n'
    for name in ("a.jsonl", "a.txt"):
        (tmp_path / name).write_text(content)
    assert source(tmp_path / "a.jsonl").model_dump() != source(tmp_path / "a.txt").model_dump()


ASKED = (Message("user", "Why?"), Message("assistant", "Because."))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Why?", "completion": "Because."},
        {"prompt": "Why?", "response": "Because.", "system": None},
        {"instruction": "Why?", "output": "Because.", "input": ""},
        {"question": "Why?", "answer": "Because.", "id": 7},
        {"prompt": [{"role": "user", "content": "Why?"}], "completion": [{"role": "assistant", "content": "Because."}]},
        {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]},
        {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
                {"role": "assistant", "content": "Because."},
            ]
        },
    ],
)
def test_to_record_finds_a_conversation_by_the_usual_names(row: dict[str, object]) -> None:
    assert to_record(row, {}) == Record(messages=ASKED)


@pytest.mark.parametrize(
    ("row", "record"),
    [
        ({"content": "plain"}, Record(text="plain")),
        ({"text": "plain", "content": 5, "question": "?"}, Record(text="plain")),
        (
            {"instruction": "Sum up.", "input": "A text.", "output": "Short.", "system": "Be brief."},
            Record(
                messages=(Message("system", "Be brief."), Message("user", "Sum up.\n\nA text."), Message("assistant", "Short."))
            ),
        ),
    ],
)
def test_to_record_finds_text_and_what_belongs_to_a_prompt(row: dict[str, object], record: Record) -> None:
    assert to_record(row, {}) == record


def test_to_record_follows_the_named_fields() -> None:
    row = {"body": "the words", "text": "not these", "q": "Why?", "a": "Because."}
    assert to_record(row, {"text": "body"}) == Record(text="the words")
    assert to_record(row, {"prompt": "q", "response": "a"}) == Record(messages=ASKED)
    assert to_record(row, {"prompt": "q"}) == Record(messages=ASKED[:1])
    assert to_record(row, {"text": "bdoy"}) == "no field 'bdoy', which calibration.fields names as text; fields: body, text, q, a"


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"text": 5}, "text: is int, not text"),
        ({"text": "a", "messages": []}, "needs exactly one of `text` and `messages`"),
        ({"id": 1, "text": None}, "none of `text`, `messages`"),
        ({"prompt": "alone"}, "none of `text`"),
        ({"messages": "hi"}, "messages: is str, not a list"),
        ({"messages": ["hi"]}, "messages.0: is str"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content: is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content: holds a part that is no text"),
        ({"text": "\ud800"}, "half of a surrogate pair"),
    ],
)
def test_to_record_says_what_is_wrong(row: dict[str, object], fault: str) -> None:
    found = to_record(row, {})
    assert isinstance(found, str) and fault in found


@pytest.mark.parametrize("fields", [{"text": "a", "prompt": "b"}, {"response": "a"}, {"messages": "a", "system": "b"}])
def test_config_refuses_fields_of_two_forms(fields: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="text alone, messages alone, or prompt"):
        CalibrationConfig.model_validate({"path": "x.jsonl", "fields": fields})


def test_check_calibration_says_that_no_column_is_usable(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "data.parquet", number=[1, 2], body=["a", "b"])
    with pytest.raises(ConfigError, match=r"bad 2 \(row 1: none of .*fields: number, body; name them in calibration.fields\)"):
        check_calibration(source(path), None)
    with pytest.raises(ConfigError, match=r"bad 2 \(row 1: no field 'bodi'"):
        check_calibration(source(path, fields={"text": "bodi"}), None)


def test_prepare_counts_copies_that_differ_in_space_width_and_case(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    copies = ["Seven  lamps by the river", "seven lamps\nby the RIVER", "Ｓeven lamps by the river", "Eight lamps by the river"]
    path.write_text("\n".join(json.dumps({"text": copy}) for copy in copies))
    report = prepare(source(path), tiny_llama).report
    assert (report.num_read, report.num_duplicate, report.num_used + report.num_held_out) == (4, 2, 2)


def test_prepare_counts_octaves_and_cut_samples(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    lengths = [16, 17, 32, 33, 200, 300]  # a byte is a token here
    path.write_text("\n".join(json.dumps({"text": chr(97 + index) * length}) for index, length in enumerate(lengths)))
    prepared = prepare(source(path, max_length=128, held_out_ratio=0.01), tiny_llama)
    kept = [min(length, 128) for length in lengths]
    kept.remove(len(prepared.held_out[0]))
    expected = {"9-16": (9, 16), "17-32": (17, 32), "33-64": (33, 64), "65-128": (65, 128)}
    histogram = {name: sum(low <= length <= high for length in kept) for name, (low, high) in expected.items()}
    assert {name: count for name, count in prepared.report.length_histogram.items() if count} == {
        name: count for name, count in histogram.items() if count
    }
    assert prepared.report.num_cut == kept.count(128)
