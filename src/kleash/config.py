"""Options: dataclass fields that know their help, their limits and how to read themselves from a recipe or a
command line.

A recipe is flat YAML; `key=value` overrides are typed by the field's annotation; a key nobody knows is an
error that names the nearest one. Every field carries its own documentation, so the command line and the pages
list what there is.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from kleash.errors import UsageError

C = TypeVar("C")
REQUIRED = MISSING  # an option without a default


@dataclass(frozen=True)
class Option:
    """One option as documentation and command line show it."""

    name: str
    type: str
    default: Any
    required: bool
    help: str
    choices: tuple[Any, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None

    @property
    def written_default(self) -> str:
        """The default as it is written on the command line, or `required`."""
        if self.required:
            return "required"
        if self.default is None:
            return "none"
        return str(self.default).lower() if isinstance(self.default, bool) else str(self.default)


def option(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
) -> Any:
    """A dataclass field with its help and limits (`above` excludes the limit itself); choices come from a
    Literal type.
    """
    limits = {"help": help, "minimum": minimum, "maximum": maximum, "above": above}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=limits)
    return field(default=default, metadata=limits)


def redefault(parent: type, name: str, default: Any) -> Any:
    """The field `name` of `parent` with another default and the same help and limits."""
    for f in dataclasses.fields(parent):
        if f.name == name:
            return field(default=default, metadata=f.metadata)
    raise TypeError(f"{parent.__name__} has no option {name}")


def options(kind: type) -> list[Option]:
    """Every option of a config class, in order."""
    hints = typing.get_type_hints(kind)
    return [_describe(f, hints[f.name]) for f in dataclasses.fields(kind)]


def _describe(f: dataclasses.Field[Any], hint: Any) -> Option:
    factory = f.default_factory
    default = factory() if factory is not MISSING else f.default
    required = default is MISSING
    limits = {key: f.metadata.get(key) for key in ("minimum", "maximum", "above")}
    return Option(
        f.name,
        _type_name(hint),
        None if required else default,
        required,
        f.metadata.get("help", ""),
        _choices(hint),
        **limits,
    )


def build(kind: type[C], values: Mapping[str, Any], where: str = "") -> C:
    """A validated config from raw values (of a recipe, an override or Python).

    Raises UsageError on an unknown key (with the nearest right one), a missing required option, a value of
    the wrong type or outside its limits. A method `check()` of the class, if any, looks at options together.
    """
    known = {o.name: o for o in options(kind)}
    hints = typing.get_type_hints(kind)
    for key in values:
        if key not in known:
            raise UsageError(_unknown(key, known, where))
    missing = [o.name for o in known.values() if o.required and values.get(o.name) is None]
    if missing:
        raise UsageError(
            f"{_at(where)}option {missing[0]} is missing ({known[missing[0]].help}). Give {missing[0]}=…."
        )
    converted = {key: convert(key, value, hints[key], where) for key, value in values.items()}
    for key, value in converted.items():
        _check_limits(known[key], value, where)
    config = kind(**converted)
    check = getattr(config, "check", None)
    if check is not None:
        check()
    return config


def convert(name: str, value: Any, hint: Any, where: str = "") -> Any:
    """`value` as the annotation `hint` wants it: text is parsed, a list may be written `a,b,c`; UsageError
    otherwise.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null", "")):
            return None
        return convert(name, value, next(a for a in arguments if a is not type(None)), where)
    if origin is Literal:
        if value in arguments and not isinstance(value, bool):
            return value
    elif origin is list:
        parts = value.split(",") if isinstance(value, str) else value
        if isinstance(parts, list | tuple):
            return [
                convert(name, part.strip() if isinstance(part, str) else part, arguments[0], where)
                for part in parts
            ]
    else:
        parsed = _SCALARS[hint](value)
        if parsed is not None:
            return parsed
    raise UsageError(
        f"{_at(where)}{name}={_show(value)} is not {_expected(hint)}.{_nearest(value, _choices(hint))}"
    )


def _to_bool(value: Any) -> bool | None:
    if isinstance(value, str):
        return {
            "true": True,
            "yes": True,
            "on": True,
            "1": True,
            "false": False,
            "no": False,
            "off": False,
            "0": False,
        }.get(value.lower())
    return value if isinstance(value, bool) else None


def _to_int(value: Any) -> int | None:
    number = _to_float(value)
    return int(number) if number is not None and number == int(number) else None


def _to_float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _to_str(value: Any) -> str | None:
    return str(value) if isinstance(value, str | Path) else None


_SCALARS: dict[Any, Any] = {bool: _to_bool, int: _to_int, float: _to_float, str: _to_str}


def _check_limits(o: Option, value: Any, where: str) -> None:
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        low = o.minimum is not None and number < o.minimum or o.above is not None and number <= o.above
        if low or (o.maximum is not None and number > o.maximum):
            raise UsageError(
                f"{_at(where)}{o.name}={_show(number)} is outside its limits: {_limits(o)}. ({o.help})"
            )


def _limits(o: Option) -> str:
    words = [
        (o.minimum, "at least {:g}"),
        (o.above, "above {:g}"),
        (o.maximum, "at most {:g}"),
    ]
    return " and ".join(text.format(limit) for limit, text in words if limit is not None)


def parse_overrides(arguments: Iterable[str]) -> dict[str, str]:
    """`["beta=0.1", "seed=3"]` as a mapping of texts; UsageError where one has no `=` or comes twice."""
    values: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        key = key.strip().lstrip("-").replace("-", "_")
        if not equals or not key:
            raise UsageError(f"{argument!r} is not an option: write key=value, for example beta=0.1.")
        if key in values:
            raise UsageError(f"option {key} is given twice: {key}={values[key]} and {key}={value}.")
        values[key] = value
    return values


class _Once(yaml.SafeLoader):
    """YAML in which a key that comes twice is an error; the last would win without a word."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """See SafeLoader."""
        keys = [key.value for key, _ in node.value]
        for key, _ in node.value:
            if keys.count(key.value) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"found {key.value!r} twice", key.start_mark
                )
        return super().construct_mapping(node, deep)


def read_recipe(path: str | Path) -> tuple[str, dict[str, Any]]:
    """The method and the options of a recipe file; UsageError where it is not a flat YAML mapping with
    `method`.
    """
    path = Path(path)
    try:
        values = yaml.load(path.read_text(encoding="utf-8-sig"), _Once)  # noqa: S506  (a SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"recipe {path} cannot be read: {error}.") from error
    except yaml.YAMLError as error:
        raise UsageError(f"recipe {path} is not YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UsageError(f"recipe {path} must hold lines of the form `key: value`; it holds {_show(values)}.")
    method = values.pop("method", None)
    if not isinstance(method, str):
        raise UsageError(
            f"recipe {path} does not say which method it is for: add a line such as `method: dpo`."
        )
    return method, values


def resolved(config: Any) -> dict[str, Any]:
    """Every option with the value in force, as plain data for `config.yaml`; objects are only named."""
    return {f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(config)}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(v) for key, v in value.items()}
    if (
        isinstance(value, list | tuple)
        and all(isinstance(v, int | float | str | Path) for v in value)
        and len(value) <= 32
    ):
        return [_plain(v) for v in value]
    return f"<{object_name(value)}>"


def object_name(value: Any) -> str:
    """A short name for an object given in place of a file or folder."""
    if isinstance(value, tuple):
        return " and ".join(type(part).__name__ for part in value)
    if isinstance(value, list):
        return f"list of {len(value)}"
    return getattr(value, "__name__", None) or type(value).__name__


def _unknown(key: str, known: Iterable[str], where: str) -> str:
    near = difflib.get_close_matches(key, list(known), n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"the options are {', '.join(sorted(known))}."
    return f"{_at(where)}there is no option {key}: {hint}"


def _at(where: str) -> str:
    return f"{where}: " if where else ""


def _show(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def _nearest(value: Any, choices: tuple[Any, ...]) -> str:
    near = difflib.get_close_matches(str(value), [str(c) for c in choices], n=1)
    return f" Did you mean {near[0]}?" if near else ""


def _choices(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint)
    for argument in typing.get_args(hint):
        if typing.get_origin(argument) is Literal:
            return typing.get_args(argument)
    return ()


def _expected(hint: Any) -> str:
    if _choices(hint):
        return "one of " + ", ".join(str(c) for c in _choices(hint))
    if typing.get_origin(hint) is list:
        return f"a list of {_type_name(typing.get_args(hint)[0])}s, written a,b,c"
    return {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}[hint]


def _type_name(hint: Any) -> str:
    if hint is Any:
        return "path, name or object"
    if _choices(hint):
        return "|".join(str(c) for c in _choices(hint))
    if hint is type(None):
        return "none"
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_type_name(a) for a in typing.get_args(hint))
    if typing.get_origin(hint) is list:
        return f"list of {_type_name(typing.get_args(hint)[0])}"
    return {bool: "true|false", int: "integer", float: "number", str: "text"}[hint]
