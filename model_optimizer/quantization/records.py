"""From a row's fields to a record: plain text, or messages for the chat template.

Fields are found by the names that public data sets use, unless the profile names them (`calibration.fields`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from model_optimizer.quantization.config import FieldRole
from model_optimizer.quantization.reading import Row

CHAT_NAMES = ("messages", "conversations")
PAIRS: tuple[Mapping[FieldRole, tuple[str, ...]], ...] = (
    {"prompt": ("prompt",), "response": ("completion", "response")},
    {"prompt": ("instruction",), "response": ("output", "response")},
    {"prompt": ("question",), "response": ("answer",)},
)
"""What stands for a question and its answer, in the order in which it is looked for."""
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant", "model": "assistant"}
"""Roles of the `from`/`value` form, and what chat templates call them."""
KNOWN = "`text`, `messages`, prompt + completion, instruction + output, question + answer"
"""What a message says can be read."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Record:
    """Plain text, or the turns of a conversation; exactly one of them."""

    text: str | None = None
    messages: tuple[Message, ...] | None = None

    def content(self) -> str:
        """Return the words alone, without template."""
        if self.messages is not None:
            return "\n".join(message.content for message in self.messages)
        return self.text or ""


class _Fault(Exception):
    """What is wrong with one row; it never leaves this module."""


def to_record(row: Row | str, fields: Mapping[FieldRole, str]) -> Record | str:
    """Return the record of a row, or what is wrong with it; `fields` says which column plays which role, {} = find it."""
    if isinstance(row, str):
        return row
    try:
        columns = _named(row, fields) if fields else _found(row)
        return _record(row, columns)
    except _Fault as fault:
        return str(fault)


def _named(row: Row, fields: Mapping[FieldRole, str]) -> Mapping[FieldRole, str]:
    for role, column in fields.items():
        if column not in row:
            raise _Fault(f"no field {column!r}, which calibration.fields names as {role}; fields: {', '.join(row) or 'none'}")
    return fields


def _found(row: Row) -> Mapping[FieldRole, str]:
    present = [name for name, value in row.items() if value is not None]
    chat = [name for name in CHAT_NAMES if name in present]
    if chat and "text" in present:
        raise _Fault("needs exactly one of `text` and `messages`; name the one that counts in calibration.fields")
    if chat:
        return {"messages": chat[0]}
    if "text" in present:
        return {"text": "text"}
    for pair in PAIRS:
        columns = {role: name for role, names in pair.items() for name in reversed(names) if name in present}
        if len(columns) == len(pair):
            return columns | {role: role for role in _optional(present)}
    if "content" in present:
        return {"text": "content"}
    raise _Fault(f"none of {KNOWN}; fields: {', '.join(row) or 'none'}; name them in calibration.fields")


def _optional(present: Sequence[str]) -> Iterable[FieldRole]:
    if "system" in present:
        yield "system"
    if "input" in present:
        yield "input"


def _record(row: Row, columns: Mapping[FieldRole, str]) -> Record:
    if column := columns.get("text"):
        return Record(text=_text(row[column], column))
    if column := columns.get("messages"):
        return Record(messages=_messages(row[column], column))
    turns: list[Message] = []
    if (column := columns.get("system")) and row[column]:
        turns.append(Message("system", _text(row[column], column)))
    asked = list(_turns(row, columns["prompt"], "user"))
    if (column := columns.get("input")) and row[column]:
        asked[-1] = Message(asked[-1].role, f"{asked[-1].content}\n\n{_text(row[column], column)}")
    answered = _turns(row, columns["response"], "assistant") if "response" in columns else ()
    return Record(messages=(*turns, *asked, *answered))


def _turns(row: Row, column: str, role: str) -> tuple[Message, ...]:
    """Return a prompt or a response, which is a text or a list of messages itself."""
    value = row[column]
    return _messages(value, column) if isinstance(value, list) and value else (Message(role, _text(value, column)),)


def _messages(value: object, column: str) -> tuple[Message, ...]:
    if not isinstance(value, list):
        raise _Fault(f"{column}: is {type(value).__name__}, not a list of messages")
    return tuple(_message(entry, f"{column}.{number}") for number, entry in enumerate(value))


def _message(entry: object, place: str) -> Message:
    if not isinstance(entry, dict):
        raise _Fault(f"{place}: is {type(entry).__name__}, not an object with role and content")
    role_name, content_name = ("from", "value") if "from" in entry and "role" not in entry else ("role", "content")
    role = _text(entry.get(role_name), f"{place}.{role_name}")
    content = entry.get(content_name)
    if isinstance(content, list):
        content = "".join(_part(part, f"{place}.{content_name}") for part in content)
    return Message(ROLES.get(role, role), _text(content, f"{place}.{content_name}"))


def _part(part: object, place: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise _Fault(f"{place}: holds a part that is no text")
    return _text(part.get("text"), place)


def _text(value: object, place: str) -> str:
    if not isinstance(value, str):
        raise _Fault(f"{place}: is {'missing' if value is None else type(value).__name__}, not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _Fault(f"{place}: holds half of a surrogate pair, which is no character") from error
    return value
