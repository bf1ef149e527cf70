"""What every section of a job file is made of."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    model_validator,
)
from pydantic.functional_validators import ModelWrapValidatorHandler

from raytrain_opt.config.error_messages import SectionError, given, problems_of
from raytrain_opt.errors import Problem


def _refuse_truth(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


_NUMBER = BeforeValidator(_refuse_truth)  # true would be 1
Float = Annotated[float, _NUMBER, Field(allow_inf_nan=False)]
PositiveInt = Annotated[int, _NUMBER, Field(gt=0)]
NonNegativeInt = Annotated[int, _NUMBER, Field(ge=0)]
PositiveFloat = Annotated[Float, Field(gt=0)]
NonNegativeFloat = Annotated[Float, Field(ge=0)]
Fraction = Annotated[Float, Field(ge=0, lt=1)]
# A wait of more than a year is a mistake, and more than some clocks can count.
Seconds = Annotated[Float, Field(gt=0, le=365 * 86400)]


def _refuse_variables(path: str) -> str:
    if variable := re.search(r"\$\{?[A-Za-z_]\w*\}?", path):
        rule = "is not replaced by its value; write the path itself, or ~ for the home"
        raise ValueError(f"{variable[0]} {rule}")
    return path


def _refuse_uri(path: str) -> str:
    if "://" in path:
        raise ValueError("must be a path in the file system of every node, not a URI")
    return path


# A path or URI.
Location = Annotated[str, AfterValidator(_refuse_variables)]
LocalPath = Annotated[Location, AfterValidator(_refuse_uri)]

_UNITS_S = {"": 1, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def parse_duration(value: object) -> object:
    """Return the seconds of 90, 90s, 45min, 2h or 1h30min; what is no text as it is."""
    if not isinstance(value, str):
        return value
    text = re.sub(r"\s", "", value).lower()
    if not re.fullmatch(r"(\d+(\.\d+)?(s|sec|m|min|h|d|$))+", text):
        raise ValueError("must be a time such as 90s, 45min or 1h30min, or a number")
    parts = re.findall(r"([\d.]+)([a-z]*)", text)
    return math.fsum(float(number) * _UNITS_S[unit] for number, unit in parts)


# Text with units, or seconds.
Duration = Annotated[Seconds, BeforeValidator(parse_duration)]


# A broken rule over several fields: the path below the section, and what is wrong.
BrokenRule = tuple[str, str]


# How a job file names an object that was given from Python: by its class, from which nobody can
# make it again.
INSTANCE_OF = "instance of "


@dataclass(frozen=True, eq=False, repr=False)
class Instance:
    """An object given from Python in place of the function or class that makes it."""

    value: Any

    def __call__(self) -> Any:
        """Return a copy: what is trained is not the caller's object."""
        return copy.deepcopy(self.value)

    def __repr__(self) -> str:
        first = self.value[0] if isinstance(self.value, tuple) and self.value else self.value
        first = getattr(first, "dataset", first)  # of a Subset
        return f"{INSTANCE_OF}{type(first).__module__}:{type(first).__qualname__}"


def function_name(function: str | Callable[..., Any]) -> str:
    """Return `package.module:function`, the form in which a job file names a function."""
    if isinstance(function, str | Instance):
        return str(function)
    return f"{function.__module__}:{function.__qualname__}"


def is_instance(function: object) -> bool:
    """Return whether it is an object given from Python, or the name of one in a job file."""
    return isinstance(function, str | Instance) and str(function).startswith(INSTANCE_OF)


def _is_object(value: object) -> bool:
    """Return whether it is neither of a job file nor a function or class."""
    plain = (str, int, float, Mapping, list, Section, Instance, type(None))
    return not isinstance(value, plain) and not hasattr(value, "__qualname__")


def _require_name(function: object) -> object:
    if _is_object(function):
        rule = "must be a function or class; put the arguments of a functools.partial into args"
        raise ValueError(rule)
    return function


def _wrap_object(value: object) -> object:
    if isinstance(value, partial):
        return _require_name(value)
    return Instance(value) if _is_object(value) else value


_Name = Annotated[
    str | Callable[..., Any],
    Field(json_schema_extra={"type": "string"}),
    PlainSerializer(function_name, str),
]
# A name, or (from Python only) the function itself.
NameOrFunction = Annotated[_Name, AfterValidator(_require_name)]
# Or the object that the function would return.
NameOrInstance = Annotated[_Name, BeforeValidator(_wrap_object)]


def is_function_name(name: object) -> bool:
    """Return whether `name` is a function, or text of the form `package.module:function`."""
    return callable(name) or (isinstance(name, str) and ":" in name)


def default_kind(key: str, name: str) -> BeforeValidator:
    """Let a section without the key that selects its kind be of this one."""

    def add(section: Any) -> Any:
        is_unnamed = isinstance(section, Mapping) and key not in section
        return {key: name, **section} if is_unnamed else section

    return BeforeValidator(add)


class Section(BaseModel):
    """A part of the job file: unknown keys are refused, values never change after loading."""

    # The text below a field is its description, in the schema and in docs/job-file.md.
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
        use_attribute_docstrings=True,
    )

    if TYPE_CHECKING:
        # Values are given as in the job file (`model="resnet8"`), which is more than the types
        # of the fields allow; pydantic checks them.
        def __init__(self, **values: Any) -> None: ...

    error: ClassVar[type[Exception]] = SectionError

    def broken_rules(self) -> Iterable[BrokenRule]:
        """Yield every rule over several fields that this section breaks, though each is valid."""
        return ()

    @model_validator(mode="wrap")
    @classmethod
    def _report_all_problems(cls, values: Any, build: ModelWrapValidatorHandler[Self]) -> Self:
        is_name = isinstance(values, str) or callable(values) or _is_object(values)
        if is_name and issubclass(cls, NamedSection):
            values = {"name": values}
        try:
            section = build(values)
        except ValidationError as error:
            raise cls.error(problems_of(error, cls, values)) from None
        rules = section.broken_rules()
        if problems := [Problem(path, text, given(values, path)) for path, text in rules]:
            raise cls.error(problems)
        return section


class NamedSection(Section):
    """A section that may be written as a bare name: `model: resnet8`."""
