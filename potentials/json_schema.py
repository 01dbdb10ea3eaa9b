"""JSON Schemas that are enforced in full, or refused.

A keyword that is read over in silence gives samples that look right and are not. The standard lets validators ignore
keywords they don't know, and llguidance does; here every keyword must be on a list: enforced, or an annotation that
restricts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

# fmt: off
ENFORCED = frozenset((
    "type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "items", "prefixItems", "additionalItems",
    "minItems", "maxItems", "properties", "required", "additionalProperties", "patternProperties",
    "minProperties", "maxProperties", "minLength", "maxLength", "pattern", "format", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
))
# fmt: on
# fmt: off
ANNOTATIONS = frozenset((
    "$schema", "$id", "id", "$anchor", "$comment", "$defs", "definitions", "title", "description", "default",
    "examples", "readOnly", "writeOnly", "deprecated", "contentEncoding", "contentMediaType", "discriminator",
    "x-guidance",
))
# fmt: on
MAPS_OF_SCHEMAS = frozenset(("properties", "patternProperties", "$defs", "definitions"))
SCHEMAS = frozenset(("items", "additionalItems", "additionalProperties", "prefixItems", "anyOf", "oneOf", "allOf"))


def schema_text(schema: object) -> str:
    """A schema as JSON text: from a mapping, True or False, JSON text, or a pydantic model class.

    Raises:
        TypeError: something else.
        ValueError: text that is no JSON, a keyword that would not be enforced.
    """
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()  # pyright: ignore[reportAttributeAccessIssue]
    elif isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except json.JSONDecodeError as error:
            raise ValueError(f"schema is no JSON text ({error}); give a dict, JSON text or a pydantic model") from error
    if not isinstance(schema, (Mapping, bool)):
        raise TypeError(f"schema is a {type(schema).__name__}; give a dict, JSON text or a pydantic model")
    for where, keyword in _unenforced(schema, "#"):
        raise ValueError(
            f"schema keyword {keyword!r} at {where} would not be enforced; leave it out, or check it with a reward "
            "or a Where. Enforced are: " + ", ".join(sorted(ENFORCED))
        )
    return json.dumps(schema, ensure_ascii=False)


def schema_grammar(text: str, whitespace: str) -> str:
    """The grammar of the schema's documents, with the given whitespace between their tokens."""
    schema = json.loads(text)
    if schema is False:
        raise ValueError("schema is false, which no document satisfies")
    options = {"whitespace_pattern": whitespace} if whitespace else {"whitespace_flexible": False}
    schema = {} if schema is True else schema
    return "start: %json " + json.dumps(
        {**schema, "x-guidance": {**options, **schema.get("x-guidance", {})}}, ensure_ascii=False
    )


def _unenforced(schema: Any, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(schema, list):
        for i, part in enumerate(schema):
            yield from _unenforced(part, f"{where}/{i}")
    elif isinstance(schema, Mapping):
        for keyword, value in schema.items():
            stray = keyword == "additionalItems" and not isinstance(schema.get("items"), list)
            if keyword not in ENFORCED | ANNOTATIONS or stray:
                yield where, keyword
            elif keyword in MAPS_OF_SCHEMAS and isinstance(value, Mapping):
                for name, part in value.items():
                    yield from _unenforced(part, f"{where}/{keyword}/{name}")
            elif keyword in SCHEMAS:
                yield from _unenforced(value, f"{where}/{keyword}")
