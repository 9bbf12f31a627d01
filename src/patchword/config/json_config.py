"""Frozen dataclasses that are validated once and go to JSON and back; every wrong key or value is named."""

import dataclasses
import math
import types
import typing
from typing import Any, Literal, Self

from ..errors import ConfigError


class JsonConfig:
    """JSON both ways for a frozen dataclass; every wrong key or value is named."""

    @classmethod
    def cast_fields(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Some fields' values as their types; every wrong name or value is named."""
        hints = typing.get_type_hints(cls)
        if unknown := sorted(set(values) - set(hints)):
            raise ConfigError(f"{cls.__name__} has no field {', '.join(unknown)}. Its fields: {', '.join(hints)}.")
        result = {}
        for name, value in values.items():
            try:
                result[name] = cast(value, hints[name])
            except (TypeError, ValueError, OverflowError) as error:
                raise ConfigError(f"{cls.__name__}.{name}: {error}") from None
        return result

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        if not isinstance(values, dict):
            raise ConfigError(f"{cls.__name__} must be a JSON object, not {type(values).__name__}.")
        return cls(**cls.cast_fields(values))

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    def replace(self, **changes: Any) -> Self:
        return type(self).from_json({**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)}, **changes})  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        for name, value in self.cast_fields({name: getattr(self, name) for name in self.__annotations__}).items():
            object.__setattr__(self, name, value)  # frozen, but JSON's lists and lone numbers become what they mean
        self.validate()

    def validate(self) -> None:
        """Contradictions between fields; each subclass says its own."""

    def require(self, condition: bool, message: str) -> None:
        if not condition:
            raise ConfigError(message)


def cast(value: Any, hint: Any) -> Any:
    """`value` as the type `hint`, or TypeError/ValueError with a sentence. Accepts what JSON makes of our types."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return cast(value, fitting(value, [a for a in arguments if a is not type(None)]))
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{value!r} is not one of {', '.join(map(repr, arguments))}")
        return value
    if origin is tuple:
        return cast_tuple(value, arguments)
    if issubclass(hint, JsonConfig):
        return value if isinstance(value, hint) else hint.from_json(value)
    if hint is bool and not isinstance(value, bool):
        raise TypeError(f"{value!r} is not true or false")
    if hint in (int, float):
        return cast_number(value, hint)
    if not isinstance(value, hint):
        raise TypeError(f"{value!r} is not a {hint.__name__}")
    return value


def fitting(value: Any, hints: list[Any]) -> Any:
    """Of several types the one that `value` is, or whose fields a JSON object has; the first when in doubt."""
    for hint in hints:
        if isinstance(value, dict) and set(value) <= set(typing.get_type_hints(hint)):
            return hint
        if isinstance(hint, type) and isinstance(value, hint):
            return hint
    return hints[0]


def cast_tuple(value: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    if arguments == (int, int) and isinstance(value, int | float):  # a square size may be given as one number
        value = (value, value)
    if not isinstance(value, list | tuple):
        pair = arguments == (int, int)
        raise TypeError(f"{value!r} is not {'one whole number or two (height, width)' if pair else 'a list'}")
    if arguments[-1:] == (...,):
        return tuple(cast(v, arguments[0]) for v in value)
    if len(value) != len(arguments):
        raise ValueError(f"{value!r} should have {len(arguments)} entries")
    return tuple(cast(v, a) for v, a in zip(value, arguments, strict=True))


def cast_number(value: Any, hint: type) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    if not math.isfinite(value) or (hint is int and value != int(value)):
        raise ValueError(f"{value!r} is not {'a whole number' if hint is int else 'a finite number'}")
    return hint(value)
