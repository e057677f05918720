"""The bodies that clients get: OpenAI's objects for chat and text, whole or in chunks."""

import math
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel

Finish = Literal["stop", "length"]
_LEAST_LOG_PROB = -9999.0
"""Stands for minus infinity, which JSON cannot say. Source: what OpenAI's API reference says it sends."""


@dataclass(frozen=True, slots=True)
class TokenScore:
    """One token as clients see it; log-probabilities in nats."""

    text: str
    log_prob: float
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """What became known with one step: text that can be shown, its tokens' scores where asked for, and perhaps the end."""

    text: str
    scores: tuple[TokenScore, ...]
    finish: Finish | None
    num_prompt: int
    num_generated: int
    """Tokens so far."""


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class _TopLogProb(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class _ContentLogProb(_TopLogProb):
    top_logprobs: list[_TopLogProb]


class _ChatLogProbs(BaseModel):
    content: list[_ContentLogProb]
    refusal: None = None


class _TextLogProbs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class _Assistant(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class _Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class _ChatChoice(BaseModel):
    index: int = 0
    message: _Assistant
    logprobs: _ChatLogProbs | None
    finish_reason: Finish | None


class _ChatChunkChoice(BaseModel):
    index: int = 0
    delta: _Delta
    logprobs: _ChatLogProbs | None
    finish_reason: Finish | None


class _TextChoice(BaseModel):
    index: int = 0
    text: str
    logprobs: _TextLogProbs | None
    finish_reason: Finish | None


class _Object(BaseModel):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage | None = None


class ChatCompletion(_Object):
    choices: list[_ChatChoice]


class ChatChunk(_Object):
    choices: list[_ChatChunkChoice]


class TextCompletion(_Object):
    choices: list[_TextChoice]


def usage_of(piece: Piece) -> Usage:
    """Return the counts of an answer that ends with `piece`."""
    total = piece.num_prompt + piece.num_generated
    return Usage(prompt_tokens=piece.num_prompt, completion_tokens=piece.num_generated, total_tokens=total)


@dataclass
class AnswerForm(ABC):
    """How one answer is written; `scored` says whether log-probabilities were asked for."""

    model: str
    fingerprint: str
    scored: bool
    num_top: int = 0
    created: int = field(default_factory=lambda: int(time.time()))

    @abstractmethod
    def whole(self, pieces: Sequence[Piece]) -> bytes:
        """Return the answer in one object."""

    @abstractmethod
    def opening(self) -> bytes | None:
        """Return the chunk that comes before any text, where there is one."""

    @abstractmethod
    def chunk(self, piece: Piece) -> bytes:
        """Return the chunk of one piece."""

    @abstractmethod
    def usage_chunk(self, last: Piece) -> bytes:
        """Return the chunk without choices that tells the counts."""


@dataclass
class ChatForm(AnswerForm):
    """chat.completion and chat.completion.chunk."""

    identity: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")

    def whole(self, pieces: Sequence[Piece]) -> bytes:
        message = _Assistant(content="".join(piece.text for piece in pieces))
        scores = [score for piece in pieces for score in piece.scores]
        choice = _ChatChoice(message=message, logprobs=self._log_probs(scores), finish_reason=pieces[-1].finish)
        answer = ChatCompletion(
            id=self.identity,
            object="chat.completion",
            created=self.created,
            model=self.model,
            system_fingerprint=self.fingerprint,
            usage=usage_of(pieces[-1]),
            choices=[choice],
        )
        return answer.model_dump_json().encode()

    def opening(self) -> bytes:
        return self._chunk(
            [_ChatChunkChoice(delta=_Delta(role="assistant", content=""), logprobs=None, finish_reason=None)], None
        )

    def chunk(self, piece: Piece) -> bytes:
        delta = _Delta(content=piece.text) if piece.text or not piece.finish else _Delta()
        log_probs = self._log_probs(piece.scores)
        return self._chunk([_ChatChunkChoice(delta=delta, logprobs=log_probs, finish_reason=piece.finish)], None)

    def usage_chunk(self, last: Piece) -> bytes:
        return self._chunk([], usage_of(last))

    def _chunk(self, choices: list[_ChatChunkChoice], usage: Usage | None) -> bytes:
        chunk = ChatChunk(
            id=self.identity,
            object="chat.completion.chunk",
            created=self.created,
            model=self.model,
            system_fingerprint=self.fingerprint,
            usage=usage,
            choices=choices,
        )
        return chunk.model_dump_json().encode()

    def _log_probs(self, scores: Sequence[TokenScore]) -> _ChatLogProbs | None:
        if not self.scored:
            return None
        content = [
            _ContentLogProb(
                token=score.text,
                logprob=_sayable(score.log_prob),
                bytes=_bytes(score.text),
                top_logprobs=[_TopLogProb(token=text, logprob=_sayable(value), bytes=_bytes(text)) for text, value in score.top],
            )
            for score in scores
        ]
        return _ChatLogProbs(content=content)


@dataclass
class TextForm(AnswerForm):
    """text_completion, whole and in chunks."""

    identity: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    _offset: int = 0

    def whole(self, pieces: Sequence[Piece]) -> bytes:
        text = "".join(piece.text for piece in pieces)
        scores = [score for piece in pieces for score in piece.scores]
        choice = _TextChoice(text=text, logprobs=self._log_probs(scores), finish_reason=pieces[-1].finish)
        return self._object([choice], usage_of(pieces[-1]))

    def opening(self) -> None:
        return None

    def chunk(self, piece: Piece) -> bytes:
        return self._object(
            [_TextChoice(text=piece.text, logprobs=self._log_probs(piece.scores), finish_reason=piece.finish)], None
        )

    def usage_chunk(self, last: Piece) -> bytes:
        return self._object([], usage_of(last))

    def _object(self, choices: list[_TextChoice], usage: Usage | None) -> bytes:
        answer = TextCompletion(
            id=self.identity,
            object="text_completion",
            created=self.created,
            model=self.model,
            system_fingerprint=self.fingerprint,
            usage=usage,
            choices=choices,
        )
        return answer.model_dump_json().encode()

    def _log_probs(self, scores: Sequence[TokenScore]) -> _TextLogProbs | None:
        if not self.scored:
            return None
        offsets = []
        for score in scores:
            offsets.append(self._offset)
            self._offset += len(score.text)
        return _TextLogProbs(
            tokens=[score.text for score in scores],
            token_logprobs=[_sayable(score.log_prob) for score in scores],
            top_logprobs=[{text: _sayable(value) for text, value in score.top} for score in scores] if self.num_top else None,
            text_offset=offsets,
        )


def _sayable(log_prob: float) -> float:
    return max(log_prob, _LEAST_LOG_PROB) if math.isfinite(log_prob) else _LEAST_LOG_PROB


def _bytes(text: str) -> list[int] | None:
    """Return a token's bytes, or None where it is part of a character."""
    return None if "\ufffd" in text else list(text.encode())
