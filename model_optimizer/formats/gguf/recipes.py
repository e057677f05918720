"""Which block type every tensor of a file gets: by recipe, place in the model and row width.

The choices are llama.cpp's, so that a file of one name is the same mixture whoever made it.
Source: llama.cpp, src/llama-quant.cpp, llama_tensor_get_type (use_more_bits, the type of output, attn_v and ffn_down).
"""

import re
from dataclasses import dataclass

from model_optimizer.errors import ConfigError
from model_optimizer.formats.gguf.registry import BLOCKS

FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q8_0", "Q6_K": "Q8_0"}
"""What a row gets that super-blocks do not fit. llama.cpp takes Q5_1 for Q5_K; Q8_0 is larger and never worse."""
LAST_RESORT = "F16"
LAYERS_OF_70B = 80
"""Source: llama.cpp tells its 70B type, whose attn_v eight heads share, by the number of blocks."""
_BLOCK = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Recipe:
    """A mixture of block types under one name."""

    name: str
    file_type: int
    """Source: llama.h, enum llama_ftype."""
    base: str
    output: str
    """Type of the output matrix, or of the embedding where it serves as one."""
    more_bits: str | None = None
    """Type of attn_v and ffn_down in the first and last eighth of the blocks and in every third between."""


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("f32", 0, "F32", "F32"),
        Recipe("f16", 1, "F16", "F16"),
        Recipe("q4_0", 2, "Q4_0", "Q6_K"),
        Recipe("q8_0", 7, "Q8_0", "Q8_0"),
        Recipe("q4_k_m", 15, "Q4_K", "Q6_K", more_bits="Q6_K"),
        Recipe("q6_k", 18, "Q6_K", "Q6_K"),
    )
}


def recipe_named(name: str) -> Recipe:
    """Return a recipe by its name in any case.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    if name.lower() not in RECIPES:
        raise ConfigError(f"unknown GGUF recipe {name!r}; known: {', '.join(sorted(RECIPES))}")
    return RECIPES[name.lower()]


@dataclass(frozen=True, slots=True)
class Choice:
    """The type of one tensor."""

    type: str
    wanted: str
    """What the recipe says; another one than `type` where the row width does not allow it."""


def choose(recipe: Recipe, tensor: str, shape: tuple[int, ...], num_blocks: int, tied: bool) -> Choice:
    """Return how a tensor is stored; vectors stay in float32."""
    if len(shape) == 1:
        return Choice("F32", "F32")
    wanted = _wanted(recipe, tensor, num_blocks, tied)
    chosen = wanted
    while BLOCKS.get(chosen).check(shape[-1]) is not None:
        chosen = FALLBACKS.get(chosen, LAST_RESORT)
    return Choice(chosen, wanted)


def _wanted(recipe: Recipe, tensor: str, num_blocks: int, tied: bool) -> str:
    if tensor == "output.weight" or (tied and tensor == "token_embd.weight"):
        return recipe.output
    if recipe.more_bits is None or (found := _BLOCK.match(tensor)) is None:
        return recipe.base
    important = takes_more_bits(int(found[1]), num_blocks)
    if tensor.endswith("attn_v.weight"):
        return recipe.more_bits if important else "Q5_K" if num_blocks == LAYERS_OF_70B else recipe.base
    return recipe.more_bits if important and tensor.endswith("ffn_down.weight") else recipe.base


def takes_more_bits(block: int, num_blocks: int) -> bool:
    """Return whether a block is one of the first or last eighth, or the third of three between."""
    eighth = num_blocks // 8
    return block < eighth or block >= 7 * num_blocks // 8 or (block - eighth) % 3 == 2
