"""The parts of the OpenAPI document that several of its modules use."""

from typing import Any, Final

_OBJECT: Final = {"application/json": {"schema": {"type": "object"}}}
TOPIC: Final = {
    "name": "topic", "in": "path", "required": True, "schema": {"type": "string"},
}  # fmt: skip
PARTITION: Final = {
    "name": "partition", "in": "path", "required": True,
    "schema": {"type": "integer", "minimum": 0},
}  # fmt: skip
UNKNOWN: Final = (404, "There is no such topic or partition.")


def query(name: str, kind: str, text: str, **bounds: int) -> dict[str, Any]:
    """Return a query parameter."""
    return {
        "name": name, "in": "query", "description": text, "schema": {"type": kind, **bounds},
    }  # fmt: skip


def responses(*codes: tuple[int, str]) -> dict[str, Any]:
    """Return the responses of an operation: 200, or an error."""
    answers: dict[str, Any] = {"200": {"description": "Done.", "content": _OBJECT}}
    for code, text in ((400, "The request is malformed."), (401, "Credentials are needed."),
                       (403, "No permission, or wrong Host or Origin."), *codes):  # fmt: skip
        answers[str(code)] = {"description": text, "content": _PROBLEM}
    return answers


_PROBLEM: Final = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}


def get(summary: str, parameters: list[dict[str, Any]], *codes: tuple[int, str]) -> dict[str, Any]:
    """Return a GET operation."""
    return {"get": {"summary": summary, "parameters": parameters, "responses": responses(*codes)}}


def change(
    method: str,
    summary: str,
    parameters: list[dict[str, Any]],
    *codes: tuple[int, str],
    body: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return an operation that changes something, with a JSON body."""
    schema = {"type": "object", "properties": body or {}, "additionalProperties": False}
    return {
        method: {
            "summary": summary,
            "parameters": parameters,
            "requestBody": {"required": False, "content": {"application/json": {"schema": schema}}},
            "responses": responses(*codes, (415, "Content-Type is not application/json.")),
        }
    }
