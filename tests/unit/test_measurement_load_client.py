"""The client's reading of HTTP and of server-sent events, byte by byte; no network."""

import asyncio
import json

import pytest

from model_optimizer.errors import ConfigError
from model_optimizer.measurement.events import StreamReader, num_texts, texts_of_events
from model_optimizer.measurement.http_client import Answer, Connection, Endpoint
from model_optimizer.measurement.openloop import samples_of
from model_optimizer.measurement.samples import RequestStatus
from model_optimizer.measurement.token_count import count_tokens

MS = 1_000_000


def event(text: str, **more: object) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": None}], **more}).encode() + b"\n\n"


ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":9,"total_tokens":14}}\n\n'
DONE = b"data: [DONE]\n\n"


class Wire(asyncio.Transport):
    """The far end of a connection: keeps what was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close


def answered(chunks: list[bytes], *, stream: bool, closes: bool = False) -> tuple[Answer, Connection]:
    """Return what becomes of one request whose answer arrives in these pieces."""
    ended: list[Answer] = []
    connection = Connection(lambda _connection, answer: ended.append(answer))
    connection.connection_made(Wire())
    answer = Answer(b"request", 1, StreamReader(keep=True) if stream else None)
    connection.send(answer)
    for chunk in chunks:
        connection.data_received(chunk)
    if closes:
        connection.connection_lost(None)
    assert ended == ([] if answer.open else [answer])
    return answer, connection


def chunked(*contents: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(it), it) for it in contents) + b"0\r\n\r\n"


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("step", [1, 2, 3, 7, 50, 10_000])
def test_connection_reads_a_stream_however_it_is_cut(step: int) -> None:
    events = ROLE + event("one") + event(' two "content":"no"') + event("") + USAGE + DONE
    whole = STREAM_HEAD + chunked(events[:100], events[100:101], events[101:])  # a chunk ends within an event
    answer, connection = answered([whole[at : at + step] for at in range(0, len(whole), step)], stream=True)
    assert (answer.status, answer.reason) == (RequestStatus.OK, "")
    assert answer.reader is not None and len(answer.reader.text_times_ns) == 2
    assert (answer.used_tokens, answer.used_prompt) == (9, 5)
    assert list(texts_of_events(answer.reader.kept or [])) == ["one", ' two "content":"no"']
    assert connection.usable and connection.num_sent == 1


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
def test_stream_reader_takes_both_line_ends_and_the_whole_event_only(end: str) -> None:
    reader = StreamReader(keep=False)
    first, second = event("a").strip(), event("b").strip()
    reader.feed(first + end.encode() + second[:10], 1)
    assert reader.text_times_ns == [1]
    reader.feed(second[10:], 2)
    assert reader.text_times_ns == [1]
    reader.feed(end.encode(), 3)
    assert reader.text_times_ns == [1, 3]


def test_several_tokens_per_streamed_chunk_are_counted_as_tokens() -> None:
    """QA-078: role at 50 ms, then 1, 4 and 4 tokens at 100, 300 and 500 ms; the usage record says 9."""
    answer = Answer(b"", 0, StreamReader(keep=False))
    single = Answer(b"", 0, StreamReader(keep=False))
    for it in (answer, single):
        it.started_ns = 0
        assert it.reader is not None
        it.reader.feed(ROLE, 50 * MS)
        it.reader.feed(event(" a"), 100 * MS)
    assert answer.reader is not None and single.reader is not None
    answer.reader.feed(event(" b c d e"), 300 * MS)
    answer.reader.feed(event(" f g h i") + USAGE + DONE, 500 * MS)
    single.reader.feed(USAGE.replace(b":9", b":1") + DONE, 100 * MS)
    answer.complete(200, b"", 500 * MS)
    single.complete(200, b"", 100 * MS)
    samples = samples_of([answer, single], None)
    assert samples.num_tokens.tolist() == [9, 1]
    assert samples.ttft_ms().tolist() == [100.0, 100.0]
    assert samples.tpot_ms().tolist() == [50.0]  # (500 - 100) / 8; the request with one token has none
    assert samples.chunk_gap_ms().tolist() == [200.0, 200.0]
    assert samples.itl_ms().size == 0  # which chunk held how many is not known: nothing is guessed


def word_ends(text: str) -> list[int]:
    """A counter: every word is a token."""
    return [at for at in range(1, len(text) + 1) if text[at - 1] != " " and (at == len(text) or text[at] == " ")]


def test_count_tokens_by_text_gives_every_chunk_its_tokens() -> None:
    answer = Answer(b"", 0, StreamReader(keep=True))
    assert answer.reader is not None
    for at, text in ((100, " a"), (300, " b c d e"), (500, " f g h i")):
        answer.reader.feed(event(text), at * MS)
    answer.reader.feed(event("", usage=None) + DONE, 500 * MS)
    answer.complete(200, b"", 500 * MS)
    totals, chunks = count_tokens([answer], word_ends)
    assert totals.tolist() == [9] and chunks.tolist() == [1, 4, 4]


def test_count_tokens_puts_a_token_that_spans_chunks_where_it_ends() -> None:
    answer = Answer(b"", 0, StreamReader(keep=True))
    assert answer.reader is not None
    for at, text in ((1, " he"), (2, "llo wor"), (3, "ld")):
        answer.reader.feed(event(text), at)
    answer.reader.feed(DONE, 3)
    totals, chunks = count_tokens([answer], word_ends)
    assert totals.tolist() == [2] and chunks.tolist() == [0, 1, 1]


BODY = b'{"choices":[{"text":"hi","finish_reason":"length"}],"usage":{"prompt_tokens":3,"completion_tokens":2}}'


def whole(status: str, body: bytes, more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body


@pytest.mark.parametrize(
    ("data", "stream", "closes", "status", "reason"),
    [
        (whole("200 OK", BODY), False, False, RequestStatus.OK, ""),
        (whole("429 Too Many Requests", b"{}"), True, False, RequestStatus.REJECTED, "status 429"),
        (whole("503 Service Unavailable", b""), False, False, RequestStatus.REJECTED, "status 503"),
        (whole("500 Oops", b"{}"), True, False, RequestStatus.ERROR, "status 500"),
        (whole("200 OK", b"{}"), False, False, RequestStatus.ERROR, "an answer without text"),
        (whole("200 OK", BODY), True, False, RequestStatus.ERROR, "a stream was asked for, the answer came in one piece"),
        (STREAM_HEAD + chunked(ROLE, DONE), True, False, RequestStatus.ERROR, "a stream without text"),
        (
            STREAM_HEAD + chunked(event("a")),
            True, False, RequestStatus.ERROR, "a stream that ended without finish_reason or [DONE]",
        ),
        (
            STREAM_HEAD + chunked(event("a"), b'data: {"error": {"message": "x"}}\n\n'),
            True, False, RequestStatus.ERROR, "an error within the stream",
        ),
        (STREAM_HEAD + b"a\r\n", True, True, RequestStatus.ERROR, "the connection broke within the answer"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", False, False, RequestStatus.ERROR, "an answer that is no HTTP/1.1"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + BODY, False, True, RequestStatus.OK, ""),
    ],
)  # fmt: skip
def test_answer_is_judged(data: bytes, stream: bool, closes: bool, status: RequestStatus, reason: str) -> None:
    answer, _ = answered([data], stream=stream, closes=closes)
    assert (answer.status, answer.reason) == (status, reason)


def test_connection_is_not_used_again_when_the_server_closes_it() -> None:
    answer, connection = answered([whole("200 OK", BODY, "Connection: close\r\n")], stream=False)
    assert answer.status == RequestStatus.OK and not connection.usable


def test_connection_reads_two_answers_one_after_the_other() -> None:
    answer, connection = answered([whole("200 OK", BODY)], stream=False)
    second = Answer(b"again", 2, None)
    connection.send(second)
    connection.data_received(whole("200 OK", BODY))
    assert (answer.used_tokens, second.used_tokens, connection.num_sent) == (2, 2, 2)


def test_endpoint_writes_a_request() -> None:
    endpoint = Endpoint.of("http://[::1]:8000/base/", "/v1/completions", (("Authorization", "Bearer k"),))
    head, _, body = endpoint.request(b'{"a":1}').partition(b"\r\n\r\n")
    assert head.splitlines()[:2] == [b"POST /base/v1/completions HTTP/1.1", b"Host: [::1]:8000"]
    assert b"Authorization: Bearer k" in head and b"Content-Length: 7" in head and body == b'{"a":1}'
    assert Endpoint.of("https://example.org").port == 443


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:99999", "localhost:8000"])
def test_endpoint_refuses_what_is_no_server(url: str) -> None:
    with pytest.raises(ConfigError, match="http://127"):
        Endpoint.of(url)


@pytest.mark.parametrize(
    ("fields", "num"),
    [
        ('"delta":{"content":"a"}', 1),
        ('"delta": {"content": "a"}', 1),
        ('"delta":{"reasoning_content":"a","content":null}', 1),
        ('"delta":{"reasoning":"a","content":null}', 1),
        ('"delta":{"reasoning":"a","content":"a"}', 1),  # one event, however many of its fields carry text
        ('"delta":{"reasoning":null,"content":""}', 0),
        ('"delta":{},"context":"x","object":"y","prompt":"z"', 0),
        ('"text":"","logprobs":{"content":[{"token":"a","bytes":[97]}]}', 0),
        ('"text":"he said \\"text\\":\\"x\\""', 1),
    ],
)
def test_num_texts_counts_events_that_carry_text(fields: str, num: int) -> None:
    payload = f'data: {{"choices":[{{"index":0,{fields}}}]}}\n\n'.encode()
    assert num_texts(payload * 3) == 3 * num
    assert len(list(texts_of_events([payload]))) == num
