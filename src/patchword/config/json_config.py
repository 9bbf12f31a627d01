"""Base class of all configurations: frozen dataclasses, validated once, with JSON conversion both ways."""

import dataclasses
import difflib
import math
import types
import typing
from typing import Any, Literal, Self

from ..errors import ConfigError


@dataclasses.dataclass(frozen=True)
class JsonConfig:
    """A frozen dataclass whose fields are cast to their types and validated when an object is made.

    Subclasses set `section`, their path in the config of a run, and override `validate`. Errors name the full path of
    the field and the value seen: "optim.lr must be above 0, not -1".
    """

    section = ""  # not annotated, so not a field

    @classmethod
    def cast_fields(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Casts some fields' values to their types; raises a ConfigError for an unknown name or a wrong type."""
        hints = _field_types(cls)
        for name in values:
            if name not in hints:
                raise unknown_field(name, hints, cls.section or cls.__name__)
        return {name: cls._cast_field(name, value, hints[name]) for name, value in values.items()}

    @classmethod
    def _cast_field(cls, name: str, value: Any, hint: Any) -> Any:
        try:
            return cast(value, hint)
        except ConfigError:  # from a section, which has named its own field
            raise
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"{cls.path(name)} {error}.", field=cls.path(name), problem=f"{error}.") from None

    @classmethod
    def path(cls, name: str) -> str:
        """The full path of a field: "optim.lr"."""
        return f"{cls.section}.{name}" if cls.section else name

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Builds an object from a JSON object; fields that it lacks have their defaults."""
        if not isinstance(values, dict):
            raise ConfigError(f"{cls.section or cls.__name__} must be a JSON object, not {type(values).__name__}.")
        return cls(**cls.cast_fields(values))

    def to_json(self) -> dict[str, Any]:
        """Inverse of `from_json`."""
        return dataclasses.asdict(self)

    def replace(self, **changes: Any) -> Self:
        """Copies the object with some fields changed, and validates the copy."""
        return type(self).from_json({**{name: getattr(self, name) for name in _field_types(type(self))}, **changes})

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in _field_types(type(self))}
        for name, value in self.cast_fields(values).items():
            object.__setattr__(self, name, value)  # frozen; casting turns lists into tuples and 224 into (224, 224)
        self.validate()

    def validate(self) -> None:
        """Raises a ConfigError for values out of range, or that contradict each other."""

    def require(self, condition: bool, message: str) -> None:
        """Raises a ConfigError with this message unless the condition holds."""
        if not condition:
            raise ConfigError(message)

    def check(self, name: str, valid: bool, rule: str) -> None:
        """Raises a ConfigError that names a field and its value, unless it is valid: `rule` is "above 0"."""
        if not valid:
            path, problem = self.path(name), f"must be {rule}, not {getattr(self, name)}."
            raise ConfigError(f"{path} {problem}", field=path, problem=problem)

    def check_range(self, low: float, high: float, *names: str) -> None:
        """Raises a ConfigError unless each of these fields is None or between `low` and `high`, both included."""
        for name in names:
            value = getattr(self, name)
            self.check(name, value is None or low <= value <= high, f"between {low:,} and {high:,}")


def _field_types(cls: type[JsonConfig]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def unknown_field(name: str, known: typing.Iterable[str], owner: str) -> ConfigError:
    """Makes the error for a field that `owner` does not have, with the nearest name that it has."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1) or [field for field in known if field.startswith(name)]
    hint = f" Did you mean {near[0]}?" if near else ""
    fields = f" Its fields: {', '.join(known)}." if known else ""
    return ConfigError(f"{owner} has no field {name}.{hint}{fields}", code="unknown_field")


def cast(value: Any, hint: Any) -> Any:
    """Casts what JSON makes of a value to the type `hint`.

    Raises:
        TypeError, ValueError: with the end of a sentence, "must be a number, not 'x'", for the caller to complete.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return cast(value, _union_member(value, [a for a in arguments if a is not type(None)]))
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"must be one of {', '.join(map(repr, arguments))}, not {value!r}")
        return value
    if origin is tuple:
        return _cast_tuple(value, arguments)
    if issubclass(hint, JsonConfig):
        return value if isinstance(value, hint) else hint.from_json(value)
    if hint in (int, float):
        return _cast_number(value, hint)
    if not isinstance(value, hint):
        kind = {bool: "true or false", str: "a string"}.get(hint, hint.__name__)
        raise TypeError(f"must be {kind}, not {value!r}")
    return value


def _union_member(value: Any, hints: list[Any]) -> Any:
    """Picks the type of a union that `value` has, or whose fields a JSON object has; the first if none fits."""
    for hint in hints:
        if isinstance(hint, type) and isinstance(value, hint):
            return hint
        is_config = isinstance(hint, type) and issubclass(hint, JsonConfig)
        if is_config and isinstance(value, dict) and set(value) <= set(_field_types(hint)):
            return hint
    return hints[0]


def _cast_tuple(value: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    is_size = arguments == (int, int)
    if is_size and isinstance(value, int | float):  # one number is a square
        value = (value, value)
    if not isinstance(value, list | tuple):
        kind = "a list" if arguments[-1:] == (...,) else f"a list of {len(arguments)} numbers"
        raise TypeError(f"must be {'an integer or two (height, width)' if is_size else kind}, not {value!r}")
    if arguments[-1:] == (...,):
        return tuple(cast(item, arguments[0]) for item in value)
    if len(value) != len(arguments):
        raise ValueError(f"must have {len(arguments)} entries, not {value!r}")
    return tuple(cast(item, argument) for item, argument in zip(value, arguments, strict=True))


def _cast_number(value: Any, hint: type[int] | type[float]) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"must be {'an integer' if hint is int else 'a number'}, not {value!r}")
    if not math.isfinite(value) or (hint is int and value != int(value)):
        raise ValueError(f"must be {'an integer' if hint is int else 'a finite number'}, not {value!r}")
    return hint(value)
