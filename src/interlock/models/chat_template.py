"""Chat templates: Jinja in a sandbox, with the helpers that transformers gives to templates."""

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

from interlock.core.errors import CheckpointError, RequestError


def check_template(where: str, template: object) -> str:
    """`template`, which stands at `where` (a file, and its key there). Raises CheckpointError unless it is the source of a Jinja template."""
    if not isinstance(template, str) or not template.strip():
        raise CheckpointError(f"{where} is {template!r:.200}, expected the text of a Jinja template; mend it or remove it")
    try:
        _compile(template)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(f"{where} is no valid Jinja template (line {error.lineno}: {error.message}); mend it or remove it") from error
    except Exception as error:  # jinja2 compiles to Python, which has limits of its own
        raise CheckpointError(f"{where} cannot be compiled as a Jinja template ({type(error).__name__}: {error}); mend it or remove it") from error
    return template


def render_chat(template: str, context: Mapping[str, Any]) -> str:
    """Render `template`, which `check_template` has passed. Raises RequestError with the template's own words if it refuses the messages."""
    try:
        return _compile(template).render(**context)
    except jinja2.TemplateError as error:
        raise RequestError(f"the chat template refuses the messages: {error}") from error
    except Exception as error:  # a template is a program of the model's author, and may fail in any way
        raise RequestError(f"the chat template fails with these messages ({type(error).__name__}: {error}); send a plain prompt instead") from error


def check_messages(messages: object) -> list[Mapping[str, Any]]:
    """The messages of one chat as a list. Raises RequestError unless each is an object with a text `role`, and with `content` (text, a list
    of parts, or None) or `tool_calls`."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(f"messages is {messages!r}, expected a list of objects with 'role' and 'content'")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{index}] is {message!r}, expected an object with 'role' and 'content'")
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise RequestError(f"messages[{index}] has role {message.get('role')!r}, expected a text such as 'user'")
        if "content" not in message and "tool_calls" not in message:
            raise RequestError(f"messages[{index}] has keys {sorted(message, key=str)}, expected 'content' (or 'tool_calls') among them")
        content = message.get("content")
        if isinstance(content, bytes) or not isinstance(content, str | Sequence | None):
            raise RequestError(f"messages[{index}] has content {content!r}, expected text, or a list of parts")
    return list(messages)


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
