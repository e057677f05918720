"""What a profile may say about memory."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema

from model_optimizer.spec import Spec

AUTO_PAGE_TOKENS = 0
"""What `page_tokens: auto` is read as: the memory stage measures page sizes and takes one."""


def _page_tokens(value: object) -> object:
    if value == "auto":
        return AUTO_PAGE_TOKENS
    if isinstance(value, (str, bool)) or value == AUTO_PAGE_TOKENS:
        raise ValueError("give 1 to 256 tokens, or auto")
    return value


PageTokens = Annotated[
    int,
    BeforeValidator(_page_tokens),
    PlainSerializer(lambda value: value or "auto"),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": 256}, {"const": "auto"}], "title": "Page Tokens"}),
]


class MemoryConfig(Spec):
    utilization_ratio: float = Field(default=0.9, gt=0, le=0.95, description="share of free memory that the engine may use")
    breathing_room_ratio: float = Field(default=0.1, ge=0, lt=0.5, description="left free of what it may use")
    page_tokens: PageTokens = Field(default=16, ge=0, le=256, description="tokens of a KV page; `auto` measures page sizes")
    kv_precision: Literal["auto", "float32", "float16", "bfloat16", "fp8", "int8"] = Field(
        default="auto", description="of the KV cache, native runtime only; `auto` is what the weights run in"
    )
