"""Requests that a server must survive: made from its own schema and broken, and made of noise."""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "BREW")
WORDS = ("the price of the brown mare", "lime barn", "東京 🙂", "What is 4467?", "a")
ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1.5,
    2**63,
    10**400,
    1e308,
    float("nan"),
    float("-inf"),
    "",
    " \n",
    "\0",
    "\ud800",
    "\u202e",
    "../../etc/passwd",
    "' OR 1=1; --",
    "a" * 20_000,
    [],
    {},
    [[[]]],
    ["x"] * 3000,
    {"type": "and", "filters": []},
    {"\ud800": 1},
)
RAW = (
    b"",
    b"null",
    b"\xff\xfe",
    b"{",
    b'"text"',
    b"[" * 100_000,
    b'{"a":' * 20_000,
    b'{"limit": ' + b"9" * 5000 + b"}",
    b'{"model": "memstore", "model": 1}',
    b"NaN",
    b"\0" * 100,
    b"--x\r\n\r\n--x--",
)
TYPES = ("application/json", "text/plain", "multipart/form-data", "multipart/form-data; boundary=x")
TYPES += ("application/json; charset=utf-16", "application/x-www-form-urlencoded", "", "é")


@dataclass
class Request:
    """A request, as it is sent."""

    method: str
    path: str  # quoted
    operation: str = "noise"  # of the schema
    query: str = ""
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


class Hostile:
    """Makes requests for an OpenAPI schema. known: by the name of a parameter and the path of its
    operation, values that mean something to the server now.
    """

    def __init__(
        self, schema: Mapping[str, Any], seed: int, known: Callable[[str, str], list[Any]]
    ) -> None:
        self._schema, self._random, self._told = schema, random.Random(seed), known
        self._path = ""  # of the operation that a request is made for
        self.operations = [
            (method.upper(), path, operation)
            for path, of_path in schema["paths"].items()
            for method, operation in of_path.items()
        ]

    def requests(self, count: int) -> Iterator[Request]:
        """So many: each operation in turn, and noise as often as six of them."""
        rounds = [*self.operations, *[None] * 6]
        for number in range(count):
            operation = rounds[number % len(rounds)]
            yield self._noise() if operation is None else self._of(*operation)

    def _of(self, method: str, path: str, described: Mapping[str, Any]) -> Request:
        query, operation, self._path = [], f"{method} {path}", path
        for parameter in described.get("parameters", ()):
            name, required = parameter["name"], parameter.get("required", False)
            if parameter["in"] == "path":
                path = path.replace("{" + name + "}", quote(self._text(name), safe=""))
            elif parameter["in"] == "query" and (required or self._chance(0.4)):
                value = self._sample(parameter.get("schema", {}), name)
                value = self._choice(ODD) if self._chance(0.2) else value
                query.append(f"{quote(name)}={quote(_said(value), safe='')}")
        if self._chance(0.1):
            query.append("colour=red&%00=%ff&limit=%ed%a0%80")
        request = Request(method, path, operation, "&".join(query))
        for kind, of_kind in described.get("requestBody", {}).get("content", {}).items():
            self._fill(request, kind, of_kind.get("schema", {}))
        if self._chance(0.05):
            request.headers["content-type"] = self._choice(TYPES)
        return request

    def _fill(self, request: Request, kind: str, schema: Mapping[str, Any]) -> None:
        request.headers["content-type"] = kind
        if self._chance(0.08):
            request.body = self._choice(RAW)
            return
        value = self._sample(schema, "")
        if kind != "application/json":
            request.headers["content-type"] = "multipart/form-data; boundary=frontier"
            request.body = self._form(value)
            return
        for _ in range(self._random.choice((0, 0, 1, 1, 2))):
            value = self._broken(value)
        request.body = json.dumps(value).encode()

    def _form(self, value: Any) -> bytes:
        """A form; its file with a name, a strange one, or none."""
        parts = dict(value) if isinstance(value, dict) else {}
        if self._chance(0.4):
            parts = self._broken(parts)
        lines = bytearray()
        for name, said in parts.items() if isinstance(parts, dict) else ():
            named = self._choice(('; filename="a.txt"', '; filename="../b"', '; filename=""', ""))
            ending = named if name == "file" else ""
            head = f'--frontier\r\nContent-Disposition: form-data; name="{name}"{ending}\r\n\r\n'
            lines += head.encode(errors="replace") + _said(said).encode(errors="replace") + b"\r\n"
        if self._chance(0.1):
            return bytes(lines[: len(lines) // 2])
        return bytes(lines) + b"--frontier--\r\n"

    def _noise(self) -> Request:
        """A request of whatever, to wherever."""
        path = self._choice(self.operations)[1] if self._chance(0.6) else self._text("")
        path = quote(path.replace("{", "").replace("}", ""), safe="/%")
        size = self._random.randrange(200)
        body = self._choice(RAW) if self._chance(0.5) else self._random.randbytes(size)
        headers = {"content-type": self._choice(TYPES)}
        if self._chance(0.1):
            headers["content-length"] = self._choice(("-1", "x", "9" * 30, ""))
        if self._chance(0.1):
            headers["host"] = self._choice(("evil.example", "", "127.0.0.1:1:1", "[::1"))
        return Request(
            self._choice(METHODS),
            path if path.startswith("/") else "/" + path,
            body=body,
            headers=headers,
        )

    def _sample(self, schema: Mapping[str, Any], name: str, depth: int = 0) -> Any:
        """A value that fits a schema, as far as it says what fits."""
        if "$ref" in schema:
            found: Any = self._schema
            for part in schema["$ref"].removeprefix("#/").split("/"):
                found = found[part]
            return self._sample(found, name, depth + 1)
        for several in ("anyOf", "oneOf"):
            if several in schema:
                return self._sample(self._choice(schema[several]), name, depth)
        if "const" in schema:
            return schema["const"]
        known, kind = self._known(name), schema.get("type")
        if known and kind not in ("array", "object") and self._chance(0.8):
            return self._choice(known)
        if "enum" in schema:
            return self._choice(schema["enum"])
        least, most = schema.get("minimum", 0), schema.get("maximum", 20)
        match kind:
            case "object":
                return self._object(schema, depth)
            case "array":
                count = 1 if depth > 6 else self._random.randrange(1, 4)
                return [
                    self._sample(schema.get("items", {}), name, depth + 1) for _ in range(count)
                ]
            case "integer":
                return self._random.randint(int(least), max(int(least), min(int(most), 20)))
            case "number":
                return self._random.uniform(least, most)
            case "boolean":
                return self._chance(0.5)
            case "null":
                return None
        return self._choice(WORDS)

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        required = schema.get("required", ())
        made = {
            name: self._sample(of_name, name, depth + 1)
            for name, of_name in schema.get("properties", {}).items()
            if name in required or self._chance(0.2)
        }
        others = schema.get("additionalProperties")
        if isinstance(others, dict) and depth < 6:
            made["key"] = self._sample(others, "", depth + 1)
        return made

    def _broken(self, value: Any) -> Any:
        """A value with one place in it replaced, left out or added to."""
        if isinstance(value, dict) and value and self._chance(0.8):
            name = self._choice(list(value))
            if self._chance(0.15):
                return {key: kept for key, kept in value.items() if key != name}
            if self._chance(0.15):
                return {**value, self._choice(("colour", "tools", "n", "")): self._choice(ODD)}
            return {**value, name: self._broken(value[name])}
        if isinstance(value, list) and value and self._chance(0.6):
            at = self._random.randrange(len(value))
            return [*value[:at], self._broken(value[at]), *value[at + 1 :]]
        return self._choice(ODD)

    def _text(self, name: str) -> str:
        known = self._known(name)
        if known and self._chance(0.85):
            return str(self._choice(known))
        odd = [value for value in ODD if isinstance(value, str) and len(value) < 1000]
        return str(self._choice(odd)).encode(errors="replace").decode()

    def _known(self, name: str) -> list[Any]:
        return self._told(name, self._path)

    def _chance(self, share: float) -> bool:
        return self._random.random() < share

    def _choice(self, options: Any) -> Any:
        return self._random.choice(options)


def _said(value: Any) -> str:
    said = value if isinstance(value, str) else json.dumps(value)
    return said.encode(errors="replace").decode()[:10_000]
