"""The types, requests and responses that both clients share."""

from __future__ import annotations

import base64
import io
import json
import socket
import urllib.parse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, TypeVar, Union

if TYPE_CHECKING:
    from typing_extensions import TypedDict
else:
    from typing import TypedDict


# Maximum seconds without an event on a stream: the server sends keepalives.
KEEPALIVE = 5

# Maximum length of one event of a stream, in bytes.
LONGEST_EVENT = 128 << 20

# Maximum of every wait in seconds; sockets and time.sleep are limited to a few weeks.
LONGEST_WAIT = 1_000_000.0

# Minimum time between two requests about a command, in seconds.
LEAST_PAUSE = 0.1

_T = TypeVar("_T")


class Error(Exception):
    """Base class of all errors of this package."""


class Refused(Error):
    """The request was refused, and nothing has run.

    again is after how many seconds it may be tried again; None if retrying does not help.
    """

    def __init__(self, code: str, message: str, hint: str = "", status: int = 0, again: Optional[float] = None) -> None:
        super().__init__(message + ("; " + hint if hint else ""))
        self.code, self.message, self.hint, self.status, self.again = code, message, hint, status, again

    def __reduce__(self) -> Tuple[Any, ...]:
        return type(self), (self.code, self.message, self.hint, self.status, self.again)


class Unproven(Error):
    """The command has run, and processes may still be running. ``report`` may be None."""

    def __init__(self, code: str, message: str, report: Optional[Report]) -> None:
        super().__init__(message)
        self.code, self.report = code, report

    def __reduce__(self) -> Tuple[Any, ...]:
        return type(self), (self.code, str(self), self.report)


class Cancelled(Error):
    """The call was cancelled through a Cancel. The server ends it unless it has a key."""


class Lost(Error):
    """The answer did not arrive, or was incomplete. The command may have run; the server ends a call whose client disconnects."""


@dataclass(frozen=True)
class File:
    """A collected file; read it with the client's fetch. path has surrogate escapes if it is not UTF-8, as from os.fsdecode."""

    path: str
    id: str
    size: int
    media_type: str
    error: str


@dataclass(frozen=True)
class Entry:
    """An entry of a session's workspace. path has surrogate escapes if it is not UTF-8, as from os.fsdecode."""

    path: str
    type: str
    size: int
    mode: str = ""
    mtime: str = ""


@dataclass(frozen=True)
class Stored:
    """A file in the content store. It expires unless it is used before."""

    id: str
    size: int
    expires_at: str


@dataclass(frozen=True)
class Language:
    """A language for code, and for cells if ``cells`` is set."""

    name: str
    command: List[str]
    file: str
    cells: bool
    image: str = ""  # image in which it runs; "" for the server's programs


@dataclass(frozen=True)
class Image:
    """An image that calls and sessions can use."""

    name: str
    digest: str
    platform: str


# The content of a file, or a file in the content store.
Content = Union[str, bytes, File]

# The content of an upload. A file object is read to its end in pieces.
Data = Union[str, bytes, BinaryIO]


class Parts(TypedDict, total=False):
    """An image, mounts and network access in addition to the workspace, if the server's configuration permits them."""

    image: str  # name of an image
    overlay: Mapping[str, str]  # name, and path (default: /work)
    snapshot: str  # ID or name of the snapshot to begin from
    volumes: Sequence[Mapping[str, Any]]  # name, path, read_only
    network: Mapping[str, Sequence[str]]  # allow: hosts, as HOST or HOST:PORT


class CallOptions(Parts, total=False):
    """Options of a call. Times are seconds; the rest is as in docs/reference/http-api.md of sbxrun."""

    code: str
    language: str  # of code; default: python
    stdin: str
    env: Mapping[str, str]
    workdir: str
    timeout: float  # default: 30; for background processes of a session, its lifetime
    grace: float
    limits: Mapping[str, Any]
    files: Mapping[str, Content]
    collect: Sequence[str]
    key: str  # a second request with the same key runs nothing and gets the first one's answer, until ten minutes after its end (for start: after it was accepted)


class ProcessOptions(CallOptions, total=False):
    """Options of a background process."""

    keep_stdin: bool  # keep stdin open after the text in stdin, for send


class CellOptions(TypedDict, total=False):
    """Options of a cell."""

    language: str  # default: python
    timeout: float  # default: 30
    limits: Mapping[str, Any]
    files: Mapping[str, Content]
    collect: Sequence[str]
    key: str


class SessionOptions(Parts, total=False):
    """Options of a session. Times are seconds."""

    limits: Mapping[str, Any]
    idle_timeout: float
    lifetime: float
    files: Mapping[str, Content]


class _Outcome:
    """The common part of a report and a cell's answer. ``data`` is the whole document."""

    def __init__(self, data: Dict[str, Any]) -> None:
        self.data = data
        self._raw = {stream: _kept(data, stream) for stream in ("stdout", "stderr")}
        self.id: str = data["id"]
        self.cause: str = data["cause"]
        self.timed_out: bool = data["timed_out"]
        self.unmatched: List[str] = data.get("unmatched") or []
        self.files: List[File] = [
            File(_path(f), f.get("id", ""), f["size"], f.get("media_type", ""), f.get("error", "")) for f in data.get("files") or []
        ]

    @property
    def stdout(self) -> str:
        return self.raw("stdout").decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        return self.raw("stderr").decode("utf-8", "replace")

    def raw(self, stream: str) -> bytes:
        """The kept bytes of stdout or stderr, as written."""
        return self._raw[stream]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(id={self.id!r}, cause={self.cause!r})"


def _kept(data: Dict[str, Any], stream: str) -> bytes:
    encoded: Optional[str] = data.get(stream + "_base64")
    if encoded is not None:
        return base64.b64decode(encoded)
    text: str = data.get(stream) or ""
    return text.encode("utf-8")


class Report(_Outcome):
    """The outcome of a call: docs/reference/report.md of sbxrun."""

    def __init__(self, data: Dict[str, Any]) -> None:
        super().__init__(data)
        self.exit_code: int = data["exit_code"]
        self.proven: bool = data["teardown"]["verdict"] != "unproven"


class Cell(_Outcome):
    """The outcome of a cell: docs/concepts/cells.md of sbxrun.

    state is kept, or lost where the next cell begins with nothing defined. value is the last
    expression's, as text; results has it in all its media, and what was displayed. exception
    has name, message and traceback.
    """

    def __init__(self, data: Dict[str, Any]) -> None:
        super().__init__(data)
        self.state: str = data["state"]
        self.number: int = data["number"]
        self.results: List[Dict[str, Any]] = data["results"]
        self.exception: Optional[Dict[str, str]] = data.get("exception")
        values = [result["media"][0].get("text") for result in self.results if result["kind"] == "value"]
        self.value: Optional[str] = values[-1] if values else None


@dataclass(frozen=True)
class Event:
    """An event of a stream: ``name`` is stdout or stderr, with ``data``, or finally report, with ``report``."""

    name: str
    data: bytes = b""
    report: Optional[Report] = None


@dataclass(frozen=True)
class Status:
    """State of a background command: queued, running or ended. If it ended without starting, a retry is safe."""

    state: str
    stdout_bytes: int
    stderr_bytes: int
    report: Optional[Report]
    error: Optional[Error]
    started: bool


@dataclass(frozen=True)
class Request:
    """wait is the time for the response in addition to the margin."""

    method: str
    path: str
    body: Union[None, bytes, BinaryIO] = None
    kind: str = ""
    wait: float = 0
    key: str = ""

    def headers(self, token: str, node: str) -> Dict[str, str]:
        headers = {"Accept": "application/json", "Connection": "close"}
        if self.body is not None:
            headers["Content-Type"] = self.kind
        if self.key:
            headers["Idempotency-Key"] = self.key
        if token:
            headers["Authorization"] = "Bearer " + token.strip()  # it may come from a file that ends with a line break
        if node:
            headers["Sbxrun-Node"] = node
        for name, value in headers.items():
            if not value.isprintable():  # a line break would start another header
                raise ValueError(f"the header {name} cannot have this value")  # which may be the token
        return headers


def quoted(text: str) -> str:
    return urllib.parse.quote(text, safe="", errors="surrogateescape")


def send_json(path: str, document: Dict[str, Any], wait: float = 0, key: str = "") -> Request:
    return Request("POST", path, json.dumps(document, allow_nan=False).encode(), "application/json", wait, key)


def send_bytes(method: str, path: str, content: Data, kind: str = "application/octet-stream") -> Request:
    if isinstance(content, io.TextIOBase):
        raise TypeError("the file must be open in binary mode")
    if isinstance(content, str):
        content = content.encode("utf-8")
    elif isinstance(content, (bytearray, memoryview)):
        content = bytes(content)
    return Request(method, path, content, kind)


def once(request: Request) -> bool:
    """Whether a retry is impossible, because its file has been read."""
    return not isinstance(request.body, (bytes, type(None)))


def fetch_request(file: Union[File, str]) -> Request:
    return Request("GET", "/v1/files/" + quoted(file if isinstance(file, str) else file.id))


def run_request(path: str, argv: Optional[Sequence[str]], options: Mapping[str, Any], timeout: float = 30) -> Request:
    """A call or a cell. A timeout of 0 means the server's default."""
    members = dict(options)
    if (argv is None) == (members.get("code") is None):
        raise ValueError("give either argv or code")
    if isinstance(argv, str):
        raise TypeError("argv is a list of words")
    if members.get("timeout", 1) <= 0:
        raise ValueError("timeout must be more than 0")
    timeout, grace, key = members.pop("timeout", timeout), members.pop("grace", 0), members.pop("key", "")
    document: Dict[str, Any] = {"timeout_ms": timeout * 1000}
    if argv is not None:
        document["argv"] = list(argv)
    else:
        document["language"] = members.pop("language", "python")
    if grace:
        document["grace_ms"] = grace * 1000
    document.update(_members(members))
    return send_json(path, document, min(timeout + grace, LONGEST_WAIT), key)


def session_request(options: Mapping[str, Any]) -> Request:
    return send_json("/v1/sessions", _members(options))


def snapshot_request(path: str, name: str, ttl: float) -> Request:
    document: Dict[str, Any] = {}
    if name:
        document["name"] = name
    if ttl:
        document["ttl_ms"] = ttl * 1000
    return send_json(path + "/snapshot", document)


def output_request(path: str, stream: str, offset: int) -> Request:
    return Request("GET", f"{path}/output?follow=1&stream={quoted(stream)}&from={offset}")


def stdin_request(path: str, data: Union[str, bytes], end: bool) -> Request:
    return send_bytes("POST", path + "/stdin" + ("?end=1" if end else ""), data)


def status_request(path: str, wait: float) -> Request:
    wait = min(wait, LONGEST_WAIT)
    return Request("GET", f"{path}?wait_ms={wait * 1000:.0f}", wait=wait)


def _members(options: Mapping[str, Any]) -> Dict[str, Any]:
    document: Dict[str, Any] = {}
    for name, value in options.items():
        if not value and name != "code":
            continue
        if name == "files":
            value = [_file(path, content) for path, content in value.items()]
        elif name in ("idle_timeout", "lifetime"):
            name, value = name + "_ms", value * 1000
        elif isinstance(value, Mapping):
            value = dict(value)
        elif name in ("collect", "volumes"):
            if isinstance(value, str):
                raise TypeError(f"{name} is a list")  # otherwise a string would become a list of letters
            value = list(value)
        document[name] = value
    return document


def _file(path: str, content: Content) -> Dict[str, str]:
    raw = path.encode("utf-8", "surrogateescape")
    name = {"path": path} if raw == path.encode("utf-8", "replace") else {"path_base64": base64.b64encode(raw).decode()}
    if isinstance(content, File):
        return {**name, "id": content.id}
    if isinstance(content, str):
        return {**name, "text": content}
    return {**name, "base64": base64.b64encode(content).decode()}


def _path(data: Dict[str, Any]) -> str:
    encoded: Optional[str] = data.get("path_base64")
    if encoded is not None:
        return base64.b64decode(encoded).decode("utf-8", "surrogateescape")
    return _text(data["path"])


def read(text: bytes, make: Callable[[Any], _T]) -> _T:
    """Return make of a document. Raises Lost if the answer is malformed."""
    try:
        return make(json.loads(text))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, MemoryError) as e:
        raise Lost(f"no valid answer: {type(e).__name__}: {e}") from e


def document(text: bytes) -> Dict[str, Any]:
    """The document itself."""
    return read(text, _object)


def identity(text: bytes) -> str:
    """The ID of the created object."""
    return read(text, lambda data: _text(data["id"]))


def _object(value: Any) -> Dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("not an object")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def status(text: bytes) -> Status:
    return read(text, _status)


def _status(data: Dict[str, Any]) -> Status:
    report, failed = data.get("report"), data.get("error")
    started = data.get("started", bool(report))
    error = failure({"error": failed, "started": started or failed["code"] == "unproven", "report": report}) if failed else None
    if not (report or error) and data["state"] == "ended":
        raise ValueError("an end without a report")
    return Status(data["state"], data.get("stdout_bytes", 0), data.get("stderr_bytes", 0), Report(report) if report else None, error, started)


def languages(text: bytes) -> List[Language]:
    return read(text, lambda data: [Language(a["name"], a["command"], a["file"], a["cells"], a.get("image", "")) for a in data["languages"]])


def images(text: bytes) -> List[Image]:
    return read(text, lambda data: [Image(a["name"], a["digest"], a["platform"]) for a in data["images"]])


def entries(text: bytes) -> List[Entry]:
    return read(text, lambda data: [Entry(_path(e), e["type"], e["size"], e.get("mode", ""), e.get("mtime", "")) for e in data["files"]])


def stored(text: bytes) -> List[Stored]:
    return read(text, lambda data: [Stored(f["id"], f["size"], f["expires_at"]) for f in data["files"]])


def identities(text: bytes) -> List[str]:
    return read(text, lambda data: [_text(s["id"]) for s in data["sessions"]])


def snapshots(text: bytes) -> List[Dict[str, Any]]:
    return read(text, lambda data: [_object(s) for s in data["snapshots"]])


def answered(status: int, again: Optional[str], text: bytes) -> Error:
    """The error in a response. again is its Retry-After."""
    try:
        e = read(text, lambda data: failure(data, status))
    except Lost:
        return Lost(f"no valid answer: status {status}")
    if isinstance(e, Refused) and status in (429, 503):
        try:
            e.again = max(0.0, float(again or "1"))
        except ValueError:
            e.again = 1.0
    return e


def failure(document: Dict[str, Any], status: int = 0) -> Error:
    failed = document["error"]
    if document["started"] is not False:
        report = document.get("report")
        return Unproven(failed["code"], failed["message"], Report(report) if report else None)
    return Refused(failed["code"], failed["message"], failed.get("hint", ""), status)


class Retries:
    """Delays for retrying temporarily refused requests."""

    def __init__(self, patience: float, now: float) -> None:
        self._until = now + patience
        self._least = LEAST_PAUSE  # doubles with each try, even if the server says 0

    def pause(self, refused: Refused, request: Request, now: float) -> float:
        """Return the time until the next attempt, or raise the error if there is none."""
        if refused.again is None or once(request):
            raise refused
        pause = min(max(refused.again, self._least), LONGEST_WAIT)
        self._least = min(2 * self._least, 5)
        if now + pause > self._until:
            raise refused
        return pause


class Events:
    """The events of a stream, from pieces of any size."""

    def __init__(self) -> None:
        self._rest: List[bytes] = []  # of a line
        self._length = 0

    def feed(self, chunk: bytes) -> Iterator[Event]:
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            whole = b"".join([*self._rest, line])
            self._rest, self._length = [], 0
            for event in read(whole, self._event):
                if isinstance(event, Error):
                    raise event
                yield event
        self._rest.append(rest)
        self._length += len(rest)
        if self._length > LONGEST_EVENT:
            raise Lost(f"no valid answer: an event has more than {LONGEST_EVENT} bytes")

    @staticmethod
    def _event(event: Dict[str, Any]) -> List[Union[Event, Error]]:
        name = event["event"]
        if name == "report":
            return [Event(name, report=Report(event["report"]))]
        if name == "error":
            return [failure(event["error"])]
        if name in ("stdout", "stderr"):
            return [Event(name, base64.b64decode(event["base64"]) if "base64" in event else event.get("text", "").encode("utf-8"))]
        return []


class Address:
    """The address of a server: unix:PATH, http://HOST:PORT or https://HOST:PORT."""

    def __init__(self, text: str) -> None:
        parts = urllib.parse.urlsplit(text)
        unix = parts.scheme == "unix" and text != "unix:"
        # Ignoring the rest of the address could reach another server.
        web = parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc and parts.path in ("", "/") and not parts.query + parts.fragment
        if not (unix or web):
            raise ValueError("want unix:PATH, http://HOST:PORT or https://HOST:PORT")
        self.path = text[len("unix:"):] if parts.scheme == "unix" else ""
        self.tls = parts.scheme == "https"
        self.host = parts.hostname or "sbxrun"
        self.port = parts.port or (443 if self.tls else 80)
        self.netloc = parts.netloc or "sbxrun"


def unix_socket(path: str) -> socket.socket:
    """Return a connected socket. asyncio misinterprets EAGAIN, the error of a full queue, as a pending connection."""
    s = socket.socket(socket.AF_UNIX)
    try:
        s.setblocking(False)  # this does not wait in any case
        s.connect(path)
    except BaseException:
        s.close()
        raise
    return s
