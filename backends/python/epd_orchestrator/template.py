"""Chat templates, rendered as transformers renders them, without importing it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from epd_scheduler.request import RefusedError
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplate:
    """One compiled template; `variables` are the special tokens that it may name (`bos_token`, ...)."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self._template = environment.from_string(source)
        self._variables = dict(variables)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt for `messages`, generation prompt added. Raises RefusedError when the template objects."""
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._variables
            )
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise RefusedError(
                "invalid_argument", f"messages: the checkpoint's chat template does not accept them: {error}"
            ) from error


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part for training; for a prompt its body is all that matters."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """json.dumps; jinja2's own filter escapes HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
