"""Reads which layers have a part, such as experts, as Megatron's flags spell it.

That is every N-th, or a list of 0 and 1.

A list may be added up and repeated as in Python, such as ([0]*3+[1]*58). It is read as a syntax
tree and never run.
"""

import ast

from megatron.errors import ConfigError

EVERY_LAYER = "1"


def layers_of_pattern(
    text: str, layers: int, *, flag: str = "--moe-layer-freq", last: bool = False
) -> tuple[bool, ...]:
    """Return for each of `layers` whether the pattern has a 1 for it.

    Args:
        text: N for the layers 0, N, 2N, .. (0 is the first); or a list of 0 and 1 for all layers.
        flag: whose value it is.
        last: N is for the layers N - 1, 2N - 1, .. instead.

    Raises:
        ConfigError: it is neither, or a list of another length.
    """
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body, layers)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(
            "this is no pattern of layers",
            found=f"{flag} {text}",
            fix=f"use 2 for every second layer, or a list such as {example(layers)}",
        ) from error
    if isinstance(value, int):
        if value < 1:
            raise ConfigError(
                "layers cannot be counted in such steps",
                found=f"{flag} {text}",
                fix="use 1 for all layers, or 2 for every second one",
            )
        return tuple((layer + last) % value == 0 for layer in range(layers))
    if len(value) != layers:
        raise ConfigError(
            "the pattern is not of as many layers as the model has",
            found=f"{flag} {text}, --num-layers {layers}",
            fix=f"give {layers} of them, such as {example(layers)}",
        )
    return tuple(bool(one) for one in value)


def example(layers: int) -> str:
    """Return a pattern of `layers` layers that leaves out the first."""
    return f"([0]*1+[1]*{layers - 1})"


def _value(node: ast.expr, longest: int) -> int | list[int]:
    """Return the number or the list that a syntax tree stands for.

    Raises:
        ValueError: it stands for something else, or for more than one entry beyond `longest`.
    """
    match node:
        case ast.Constant(value=int(number)) if type(number) is int:
            return number
        case ast.List(elts=entries):
            values = [_value(entry, longest) for entry in entries]
            listed = [value for value in values if value in (0, 1) and isinstance(value, int)]
            if len(listed) == len(values):
                return listed
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _value(left, longest), _value(right, longest)
            if isinstance(first, list) and isinstance(second, list):
                return first + second
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            first, second = _value(left, longest), _value(right, longest)
            if isinstance(first, int):
                first, second = second, first
            if isinstance(first, list) and isinstance(second, int):
                # What is too long anyway is not made in memory.
                return (first * min(second, longest + 1))[: longest + 1]
    raise ValueError(ast.dump(node))
