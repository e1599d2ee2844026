"""Options of commands, declared once: as fields of a pydantic model.

Field ``batch_size`` is the flag ``--batch-size`` and the variable ``ZMQTRAIN_BATCH_SIZE``, a
boolean field the pair ``--name/--no-name``. click reads both, shows them in ``--help`` and names
them in errors; the field defines which values are valid. A field is an option if it has a
description and its type is not Any; its title, if any, is the option's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import click
from pydantic import BaseModel, BeforeValidator, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from zmqtrain.hints import did_you_mean, expectation

PREFIX = "ZMQTRAIN_"
OTHERS = ("ROLE", "MAX_RESTARTS", "WITHIN_S", "SUPERVISED_SINCE", "DASHBOARDS")
"""Variables that belong to no field: those of `zmqtrain supervise` and of deploy/."""

_OF_SERVICES = re.compile(r"_SERVICE_(HOST|PORT\w*)$|_PORT_\d+_(TCP|UDP|SCTP)\w*$")

Command = TypeVar("Command", bound=Callable[..., Any])


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    return PREFIX + name.upper()


def names_of(name: str, value: str = "") -> str:
    """Return an option in messages: its flag and its variable, with a value if it is given."""
    flag, variable = flag_of(name), variable_of(name)
    return f"{flag} {value} (or {variable}={value})" if value else f"{flag} (or {variable})"


def text_of(value: object) -> str:
    """Return a value as a flag or a variable has it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def flags_of(values: Mapping[str, object]) -> list[str]:
    """Return options as flags for another process; None is the default."""
    arguments: list[str] = []
    for name, value in values.items():
        flag = flag_of(name)
        if isinstance(value, bool):
            arguments.append(flag if value else flag.replace("--", "--no-", 1))
        elif value is not None:
            arguments += [flag, text_of(value)]
    return arguments


def fields_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields that are options, by option name; inherited ones come last."""
    inherited = {name for base in model.__bases__ for name in getattr(base, "model_fields", ())}
    names = sorted(model.model_fields, key=lambda name: name in inherited)
    fields = [(name, model.model_fields[name]) for name in names]
    return {
        field.title or name: field
        for name, field in fields
        if field.description and field.annotation is not Any
    }


def option_of(
    model: type[BaseModel], name: str, *, help: str | None = None, optional: bool = False
) -> Callable[[Command], Command]:
    """Decorate a click command with the option of one field; None is passed if it is not given.

    ``help`` replaces the field's description. ``optional``: the option is never required and its
    default is not shown, because the value then comes from elsewhere.
    """
    field = fields_of(model)[name]
    flag = flag_of(name)
    is_switch = bool in _types(field.annotation)
    has_default = not field.is_required() and field.default not in (None, ())
    required = field.is_required() and not optional
    text = help or field.description or ""
    if has_default and not optional and "(default: " not in text:
        text += f" (default: {field.default})"
    return click.option(
        f"{flag}/--no-{flag[2:]}" if is_switch else flag,
        name,
        cls=_Option,
        type=bool if is_switch else FieldType(field),
        required=required,
        help=text,
        envvar=variable_of(name),
        show_envvar=True,
        show_default=False,
        **({} if required else {"default": None}),  # with which click would take it as given
    )


def options_of(*models: type[BaseModel], optional: bool = False) -> Callable[[Command], Command]:
    """Decorate a click command with the options of all fields of the models, see option_of."""

    def decorate(command: Command) -> Command:
        every = [(model, name) for model in models for name in fields_of(model)]
        for model, name in reversed(every):
            command = option_of(model, name, optional=optional)(command)
        return command

    return decorate


def values_of(model: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that were given for options of the model."""
    return {name: values[name] for name in fields_of(model) if values.get(name) is not None}


def mistyped(environ: Mapping[str, str], *models: type[BaseModel]) -> Iterator[str]:
    """Yield a sentence about each variable ``ZMQTRAIN_*`` that is not an option.

    Variables that Kubernetes sets for a service called zmqtrain... are ignored.
    """
    known = [*OTHERS, *(name.upper() for model in models for name in fields_of(model))]
    for variable, value in sorted(environ.items()):
        name = variable.removeprefix(PREFIX)
        is_service = _OF_SERVICES.search(variable) or (
            variable.endswith("_PORT") and "://" in value
        )
        if variable.startswith(PREFIX) and name not in known and not is_service:
            remedy = did_you_mean(name, known, PREFIX) or "; remove it"
            yield f"{variable} is set, but zmqtrain has no such variable{remedy}"


class _Option(click.Option):
    """An option that errors name by its flag and its variable."""

    def get_error_hint(self, ctx: click.Context | None) -> str:
        return names_of(self.name or "")


def parsed_by(parse: Callable[[str], Any]) -> BeforeValidator:
    """Have a field parse a text, as a flag or a variable gives it; it takes other values as well.

    ``parse`` raises ValueError for a text that is wrong.
    """
    return BeforeValidator(lambda value: parse(value) if isinstance(value, str) else value)


@dataclass(frozen=True, slots=True)
class Metavar:
    """The name in ``--help`` of the values of a field whose texts are not those of its type."""

    name: str


class FieldType(click.ParamType):  # type: ignore[type-arg]  # no generic before click 8.3
    """The type of an option: a text is valid if the field accepts it."""

    def __init__(self, field: FieldInfo) -> None:
        self._field = field
        (kind, *_) = _types(field.annotation)
        self.name = {int: "integer", float: "number"}.get(kind, "text")
        if get_origin(kind) is Literal:
            self.name = f"[{'|'.join(get_args(kind))}]"
        for each in field.metadata:
            if isinstance(each, Metavar):
                self.name = each.name

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return self.name.upper() if self.name in ("integer", "number", "text") else self.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        declared: Any = self._field.annotation
        if self._field.metadata:
            declared = Annotated[declared, *self._field.metadata]
        check: TypeAdapter[Any] = TypeAdapter(declared, config=ConfigDict(allow_inf_nan=False))
        try:
            return check.validate_python(value, context="option")
        except ValidationError as error:
            text = expectation(error.errors()[0])
            self.fail(text if repr(value) in text else f"{value!r}; {text}", param, ctx)


def _types(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union other than None, or the type itself, without annotations."""
    if get_origin(annotation) is Annotated:
        return _types(get_args(annotation)[0])
    if get_origin(annotation) not in (Union, UnionType):
        return () if annotation is type(None) else (annotation,)
    return tuple(kind for member in get_args(annotation) for kind in _types(member))
