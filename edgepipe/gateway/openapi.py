"""The API's document (OpenAPI 3.1), and a page that shows it, without external resources."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from typing import Any

from pydantic.json_schema import models_json_schema

from edgepipe import __version__
from edgepipe.gateway.endpoints import Endpoint

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "anyOf": [
                {
                    "type": "object",
                    "required": ["message", "type", "param", "code"],
                    "properties": {
                        "message": {"type": "string"},
                        "type": {"type": "string"},
                        "param": {"type": ["string", "null"]},
                        "code": {"type": ["string", "null"]},
                    },
                },
                {"type": "string", "description": "Under /api/, for Ollama's clients."},
                {
                    "type": "object",
                    "required": ["message", "type"],
                    "properties": {"message": {"type": "string"}, "type": {"type": "string"}},
                    "description": "Under /v1/messages, for Anthropic's clients.",
                },
            ]
        }
    },
}


def make_document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """Build the document of the endpoints."""
    bodies = list(dict.fromkeys(each.body for each in endpoints if each.body is not None))
    _, definitions = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(_plain(endpoint.path), {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "edgepipe",
            "version": __version__,
            "description": "One language model over the machines you own, with the APIs of OpenAI, Anthropic, Ollama.",
        },
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}) | {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    content: dict[str, Any] = {endpoint.media_type: {"schema": endpoint.answer or {"type": "string"}}}
    if endpoint.streams:
        content[endpoint.streams] = {}  # OpenAPI 3.1 has no word for a sequence of events
    problem = {"description": "The error.", "content": {"application/json": {"schema": _ref("Error")}}}
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{endpoint.method} {_plain(endpoint.path)}").strip("_").lower(),
        "tags": [endpoint.group],
        "summary": endpoint.summary,
        "responses": {"200": {"description": "The answer.", "content": content}, "default": problem},
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)", endpoint.path)
    ]
    parameters += [{"name": name, "in": "query", "schema": {"type": "string"}} for name in endpoint.query]
    if parameters:
        operation["parameters"] = parameters
    if endpoint.body is not None:
        schema = {"application/json": {"schema": _ref(endpoint.body.__name__)}}
        operation["requestBody"] = {"required": True, "content": schema}
    if endpoint.form is not None:
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": endpoint.form}}}
    if endpoint.open:
        operation["security"] = []
    return operation


def _plain(path: str) -> str:
    return re.sub(r"\{(\w+):\w+\}", r"{\1}", path)


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>edgepipe API</title><style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
summary {{ cursor: pointer; padding: .3rem 0 }} code, pre {{ font: 14px/1.4 ui-monospace, monospace }}
pre {{ overflow-x: auto; padding: .7rem; border: 1px solid #8886; border-radius: .4rem }}
.m {{ display: inline-block; width: 4rem; font-weight: 600 }} .s {{ opacity: .7 }}
table {{ border-collapse: collapse }} td {{ padding: .15rem .8rem .15rem 0; vertical-align: top }}
</style></head><body>
<h1>edgepipe API</h1>
<p>The APIs of OpenAI, Anthropic and Ollama. For programs: <a href="/openapi.json">openapi.json</a>.</p>
<pre>curl http://{host}/v1/chat/completions -H 'Content-Type: application/json' \\
  -d '{{"messages": [{{"role": "user", "content": "Hello"}}]}}'</pre>
{sections}
<h2>Bodies</h2>
{schemas}
</body></html>
"""


def make_page(document: dict[str, Any], *, host: str) -> str:
    """Build a page of the document for people. ``host``: HOST:PORT for the example."""
    groups: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            groups.setdefault(operation["tags"][0], []).append(_shown_operation(method, path, operation))
    sections = "\n".join(f"<h2>{html.escape(name)}</h2>\n{''.join(parts)}" for name, parts in groups.items())
    schemas = "\n".join(
        f'<details id="{name}"><summary><code>{name}</code></summary>{_shown_schema(schema)}</details>'
        for name, schema in document["components"]["schemas"].items()
    )
    return _PAGE.format(host=html.escape(host), sections=sections, schemas=schemas)


def _shown_operation(method: str, path: str, operation: dict[str, Any]) -> str:
    content = operation.get("requestBody", {}).get("content", {})
    name = content["application/json"]["schema"]["$ref"].rpartition("/")[2] if "application/json" in content else ""
    takes = f'<p>Takes <a href="#{name}"><code>{name}</code></a>.</p>' if name else ""
    kinds = ", ".join(operation["responses"]["200"]["content"])
    return (
        f'<details><summary><span class="m">{method.upper()}</span><code>{html.escape(path)}</code> '
        f'<span class="s">{html.escape(operation["summary"])}</span></summary>{takes}<p>Answers {kinds}.</p></details>'
    )


def _shown_schema(schema: dict[str, Any]) -> str:
    required = set(schema.get("required", ()))
    rows = "".join(
        f"<tr><td><code>{html.escape(name)}</code>{' *' if name in required else ''}</td>"
        f"<td><code>{html.escape(_kind(field))}</code></td></tr>"
        for name, field in schema.get("properties", {}).items()
    )
    return f"<p>{html.escape(schema.get('description', ''))}</p><table>{rows}</table>"


def _kind(schema: dict[str, Any]) -> str:
    shown = {name: value for name, value in schema.items() if name not in ("title", "default", "description")}
    return json.dumps(shown)[:400].replace("#/components/schemas/", "")
