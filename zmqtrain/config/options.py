"""From the fields of a pydantic model to flags and variables, so that each is declared once.

Field ``batch_size`` is the flag ``--batch-size`` and the variable ``ZMQTRAIN_BATCH_SIZE``; a
boolean field is the pair ``--name/--no-name``. Only fields with a description are options.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import click
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from zmqtrain.errors import ConfigError

PREFIX = "ZMQTRAIN_"

Command = TypeVar("Command", bound=Callable[..., Any])
Model = TypeVar("Model", bound=BaseModel)


def flag_of(field: str) -> str:
    return "--" + field.replace("_", "-")


def variable_of(field: str) -> str:
    return PREFIX + field.upper()


def names_of(field: str) -> str:
    """Return how messages name an option: by its flag and its variable."""
    return f"{flag_of(field)} (or {variable_of(field)})"


def fields_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields that are options: the model's own, then those it inherits."""
    inherited: set[str] = set()
    for base in model.__bases__:
        inherited |= getattr(base, "model_fields", {}).keys()
    names = sorted(model.model_fields, key=lambda name: name in inherited)
    fields = {name: model.model_fields[name] for name in names}
    return {name: field for name, field in fields.items() if field.description}


def options_of(*models: type[BaseModel]) -> Callable[[Command], Command]:
    """Decorate a click command with an option for each field of the models.

    The command receives each flag under its field's name: the text as it was typed, True or False
    for a boolean, None if it was not given. :func:`load` turns these into a model.
    """

    def decorate(command: Command) -> Command:
        fields = [item for model in models for item in fields_of(model).items()]
        for name, field in reversed(fields):
            command = _option(name, field)(command)
        return command

    return decorate


def given(
    model: type[BaseModel], flags: Mapping[str, Any], environ: Mapping[str, str]
) -> dict[str, Any]:
    """Return what was said about the model's options: by a flag, else by a variable.

    A flag that is None and a variable that is empty say nothing; flags of other models are ignored.
    """
    said = {}
    for name in fields_of(model):
        value = flags.get(name)
        if value is None:
            value = environ.get(variable_of(name)) or None
        if value is not None:
            said[name] = value
    return said


def load(model: type[Model], values: Mapping[str, Any]) -> Model:
    """Validate values, which may be text from a flag or a variable.

    Raises:
        ConfigError: a line for each wrong value, naming flag, variable, value and expectation.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_sentences(model, error))) from None


class _Option(click.Option):
    """Shows its variable in ``--help``, but leaves reading it to :func:`given`, the one reader."""

    def resolve_envvar_value(self, ctx: click.Context) -> None:
        return None


def _option(name: str, field: FieldInfo) -> Callable[[Command], Command]:
    is_switch = bool in _types(field.annotation)
    has_default = not field.is_required() and field.default is not None
    declaration = flag_of(name)
    return click.option(
        f"{declaration}/--no-{declaration[2:]}" if is_switch else declaration,
        name,
        cls=_Option,
        type=bool if is_switch else str,
        default=None,
        metavar=None if is_switch else _metavar(field.annotation),
        help=field.description,
        envvar=variable_of(name),
        show_envvar=True,
        show_default=str(field.default) if has_default else False,
    )


def _types(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union other than None, or the type itself, without annotations."""
    if get_origin(annotation) is Annotated:
        return _types(get_args(annotation)[0])
    if get_origin(annotation) not in (Union, UnionType):
        return () if annotation is type(None) else (annotation,)
    return tuple(kind for member in get_args(annotation) for kind in _types(member))


def _metavar(annotation: Any) -> str:
    (kind, *_) = _types(annotation)
    if get_origin(kind) is Literal:
        return f"[{'|'.join(get_args(kind))}]"
    return {int: "INTEGER", float: "NUMBER"}.get(kind, "TEXT")


def _sentences(model: type[BaseModel], error: ValidationError) -> Iterator[str]:
    for mistake in error.errors(include_url=False):
        name = str(mistake["loc"][0]) if mistake["loc"] else ""
        # Pydantic sets this before the text of a validator's ValueError.
        expected = mistake["msg"].removeprefix("Value error, ")
        if name not in model.model_fields:
            yield expected if not name else f"unknown option {name!r}; remove it"
        elif mistake["type"] == "missing":
            yield (
                f"{names_of(name)} is not given; expected "
                f"{model.model_fields[name].description}; give one of the two"
            )
        else:
            expected = re.sub(r"^\w+ should", "it should", expected)
            yield (
                f"{names_of(name)} is {_shown(mistake['input'])}; {expected}; correct it"
                f"{_or_leave(model.model_fields[name])}"
            )


def _shown(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else repr(value)


def _or_leave(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    return " or leave it out" + ("" if field.default is None else f" for {field.default}")
