"""Chat templates: Jinja in a sandbox, with the helpers that transformers gives to templates."""

import functools
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

from interlock.core.errors import RequestError


def render_chat(template: str, context: Mapping[str, Any]) -> str:
    """Render `template`. Raises RequestError with the template's own words if it refuses the messages."""
    try:
        return _compile(template).render(**context)
    except jinja2.TemplateSyntaxError as error:
        raise RequestError(f"the chat template is not valid (line {error.lineno}: {error}); send a plain prompt instead of messages") from error
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise RequestError(f"the chat template refuses the messages: {error}") from error


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what the assistant said, for training; here it is its contents."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's interface)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(fmt: str) -> str:
    return datetime.now().strftime(fmt)
