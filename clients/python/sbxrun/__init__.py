"""Client of ``sbxrun serve``: run commands and programs that nobody trusts.

A non-zero exit code and a timeout are reports. Exceptions are for what has not run
(:class:`Refused`), of which something may be left (:class:`Unproven`), or of which the
answer did not come (:class:`Lost`).
"""

from __future__ import annotations

import base64
import http.client
import json
import socket
import time
import urllib.parse
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Type, Union

__all__ = ["Client", "Session", "Report", "Event", "File", "Entry", "Error", "Refused", "Unproven", "Lost"]


class Error(Exception):
    """What all errors of this module are."""


class Refused(Error):
    """The request came to nothing: nothing of it has run.

    again is after how many seconds it may be tried again; None if that is no use.
    """

    def __init__(self, code: str, message: str, hint: str = "", status: int = 0, again: Optional[float] = None) -> None:
        super().__init__(message + ("; " + hint if hint else ""))
        self.code, self.message, self.hint, self.status, self.again = code, message, hint, status, again


class Unproven(Error):
    """It has run, and something of it may be left. ``report`` is None where there is none."""

    def __init__(self, code: str, message: str, report: Optional[Report]) -> None:
        super().__init__(message)
        self.code, self.report = code, report


class Lost(Error):
    """The answer did not come, or not whole. It may have run; the server ends a call whose client has left."""


@dataclass(frozen=True)
class File:
    """A file that was collected: :meth:`Client.fetch` has what it holds."""

    path: str
    id: str
    size: int
    media_type: str
    error: str


@dataclass(frozen=True)
class Entry:
    """What a list of a session's files shows."""

    path: str
    type: str
    size: int


class Report:
    """How a call has ended. ``data`` is the whole document, docs/report.md of sbxrun."""

    def __init__(self, data: Dict[str, Any]) -> None:
        self.data = data
        self.id: str = data["id"]
        self.cause: str = data["cause"]
        self.exit_code: int = data["exit_code"]
        self.timed_out: bool = data["timed_out"]
        self.proven: bool = data["teardown"]["verdict"] != "unproven"
        self.files: List[File] = [
            File(f["path"], f.get("id", ""), f["size"], f.get("media_type", ""), f.get("error", "")) for f in data.get("files") or []
        ]

    @property
    def stdout(self) -> str:
        return self.raw("stdout").decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        return self.raw("stderr").decode("utf-8", "replace")

    def raw(self, stream: str) -> bytes:
        """What was kept of stdout or stderr, as it was written."""
        encoded = self.data.get(stream + "_base64")
        if encoded is not None:
            return base64.b64decode(encoded)
        return (self.data.get(stream) or "").encode("utf-8")

    def __repr__(self) -> str:
        return f"Report(cause={self.cause!r}, exit_code={self.exit_code})"


@dataclass(frozen=True)
class Event:
    """A piece of a stream: ``name`` is stdout or stderr, with ``data``; and last report, with ``report``."""

    name: str
    data: bytes = b""
    report: Optional[Report] = None


# What a file holds, or one of the content store.
Content = Union[str, bytes, File]


class _Unix(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("sbxrun", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            s.settimeout(self.timeout)
            s.connect(self._path)
        except BaseException:
            s.close()
            raise
        self.sock = s


class _Calls:
    """Ways to run something, of a client and of a session."""

    _client: Client
    _exec: str

    def _run(
        self, argv: Optional[Sequence[str]], code: Optional[str], language: str, stdin: str, env: Optional[Mapping[str, str]], timeout: float,
        grace: float, limits: Optional[Mapping[str, Any]], files: Optional[Mapping[str, Content]], collect: Sequence[str],
    ) -> Dict[str, Any]:
        if (argv is None) == (code is None):
            raise ValueError("give either argv or code")
        if timeout <= 0:
            raise ValueError("timeout must be more than 0")
        call: Dict[str, Any] = {"timeout_ms": timeout * 1000}
        if argv is not None:
            if isinstance(argv, str):
                raise TypeError("argv is a list of words")
            call["argv"] = list(argv)
        else:
            call["language"], call["code"] = language, code
        for name, value in (("stdin", stdin), ("env", dict(env or {})), ("grace_ms", grace * 1000), ("limits", dict(limits or {})),
                            ("files", _files(files)), ("collect", list(collect))):
            if value:
                call[name] = value
        return call

    def _answer(self, call: Dict[str, Any]) -> Report:
        wait = (call["timeout_ms"] + call.get("grace_ms", 0)) / 1000
        return Report(self._client._json("POST", self._exec, call, wait))

    def stream(
        self, argv: Optional[Sequence[str]] = None, *, code: Optional[str] = None, language: str = "python", stdin: str = "",
        env: Optional[Mapping[str, str]] = None, timeout: float = 30, grace: float = 0, limits: Optional[Mapping[str, Any]] = None,
        files: Optional[Mapping[str, Content]] = None, collect: Sequence[str] = (),
    ) -> Iterator[Event]:
        """As run, with the output while it comes. The last event is the report; who stops before ends the call."""
        call = self._run(argv, code, language, stdin, env, timeout, grace, limits, files, collect)
        return self._client._events(self._exec + "?stream=1", call)


def _files(files: Optional[Mapping[str, Content]]) -> List[Dict[str, str]]:
    out = []
    for path, content in (files or {}).items():
        if isinstance(content, File):
            out.append({"path": path, "id": content.id})
        elif isinstance(content, str):
            out.append({"path": path, "text": content})
        else:
            out.append({"path": path, "base64": base64.b64encode(content).decode()})
    return out


class Client(_Calls):
    """A server, at unix:PATH, http://HOST:PORT or https://HOST:PORT.

    margin is how many seconds longer than a call's own timeout its answer is waited for;
    patience, for how many seconds what was refused for a moment is tried again.
    """

    def __init__(self, address: str, token: str = "", *, margin: float = 60, patience: float = 10) -> None:
        self._client, self._exec = self, "/v1/run"
        self._address = urllib.parse.urlsplit(address)
        if self._address.scheme not in ("unix", "http", "https"):
            raise ValueError("want unix:PATH, http://HOST:PORT or https://HOST:PORT")
        self._token, self._margin, self._patience = token, margin, patience

    def run(
        self, argv: Optional[Sequence[str]] = None, *, code: Optional[str] = None, language: str = "python", stdin: str = "",
        env: Optional[Mapping[str, str]] = None, timeout: float = 30, grace: float = 0, limits: Optional[Mapping[str, Any]] = None,
        files: Optional[Mapping[str, Content]] = None, collect: Sequence[str] = (),
    ) -> Report:
        """Run a command, or a program, in a fresh sandbox. When this returns nothing of it is left."""
        return self._answer(self._run(argv, code, language, stdin, env, timeout, grace, limits, files, collect))

    def session(
        self, *, limits: Optional[Mapping[str, Any]] = None, idle_timeout: float = 0, lifetime: float = 0,
        files: Optional[Mapping[str, Content]] = None,
    ) -> Session:
        """Make a sandbox whose files stay from call to call. Use it in a with statement, or end it."""
        body: Dict[str, Any] = {}
        for name, value in (("limits", dict(limits or {})), ("idle_timeout_ms", idle_timeout * 1000), ("lifetime_ms", lifetime * 1000),
                            ("files", _files(files))):
            if value:
                body[name] = value
        return Session(self, self._json("POST", "/v1/sessions", body)["id"])

    def store(self, data: bytes) -> str:
        """Put a file into the content store, and return its id."""
        stored: str = json.loads(self._ask("POST", "/v1/files", data, "application/octet-stream"))["id"]
        return stored

    def fetch(self, file: Union[File, str]) -> bytes:
        """Read a file of the content store: one that was collected, or an id."""
        return self._ask("GET", "/v1/files/" + urllib.parse.quote(file if isinstance(file, str) else file.id))

    def _json(self, method: str, path: str, body: Any, wait: float = 0) -> Dict[str, Any]:
        try:
            answer: Dict[str, Any] = json.loads(self._ask(method, path, json.dumps(body).encode(), "application/json", wait))
        except ValueError as e:
            raise Lost(f"the answer is none: {e}") from e
        return answer

    def _ask(self, method: str, path: str, body: Optional[bytes] = None, kind: str = "", wait: float = 0) -> bytes:
        connection, response = self._send(method, path, body, kind, wait)
        try:
            return response.read()
        except (OSError, http.client.HTTPException) as e:
            raise Lost(f"the answer broke off: {e!r}") from e
        finally:
            connection.close()

    def _connect(self, wait: float) -> http.client.HTTPConnection:
        timeout = wait + self._margin
        if self._address.scheme == "unix":
            return _Unix(self._address.path, timeout)
        host = self._address.netloc
        if self._address.scheme == "https":
            return http.client.HTTPSConnection(host, timeout=timeout)
        return http.client.HTTPConnection(host, timeout=timeout)

    def _send(self, method: str, path: str, body: Optional[bytes], kind: str, wait: float) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Send a request until it is not refused for a moment only, and return the answer, which has status 200 or the like."""
        until = time.monotonic() + self._patience
        while True:
            try:
                return self._once(method, path, body, kind, wait)
            except Refused as e:
                if e.again is None or time.monotonic() + e.again > until:
                    raise
                pause = e.again
            time.sleep(pause)

    def _once(self, method: str, path: str, body: Optional[bytes], kind: str, wait: float) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        headers = {"Accept": "application/json"}
        if kind:
            headers["Content-Type"] = kind
        if self._token:
            headers["Authorization"] = "Bearer " + self._token
        connection = self._connect(wait)
        try:
            try:
                connection.connect()
            except OSError as e:
                raise Refused("unreachable", f"the server cannot be reached: {e}") from e
            try:
                try:
                    connection.request(method, path, body, headers)
                except (BrokenPipeError, ConnectionResetError):
                    pass  # it may have answered before it has read all, and then it says why
                response = connection.getresponse()
                if response.status < 300:
                    return connection, response
                text = response.read()
            except (OSError, http.client.HTTPException) as e:
                raise Lost(f"the answer did not come: {e!r}") from e
            raise _error(response, text)
        except BaseException:
            connection.close()
            raise

    def _events(self, path: str, call: Dict[str, Any]) -> Iterator[Event]:
        connection, response = self._send("POST", path, json.dumps(call).encode(), "application/json", 0)
        try:
            while True:
                try:
                    line = response.readline()
                    event = json.loads(line) if line.endswith(b"\n") else None
                except (OSError, http.client.HTTPException, ValueError) as e:
                    raise Lost(f"the stream broke off: {e!r}") from e
                if event is None:
                    raise Lost("the stream has no end")
                name = event["event"]
                if name == "report":
                    yield Event(name, report=Report(event["report"]))
                    return
                if name == "error":
                    raise _failure(event["error"], 0)
                if name in ("stdout", "stderr"):
                    yield Event(name, base64.b64decode(event["base64"]) if "base64" in event else event.get("text", "").encode("utf-8"))
        finally:
            connection.close()


def _error(response: http.client.HTTPResponse, text: bytes) -> Error:
    """The error of an answer."""
    try:
        e = _failure(json.loads(text), response.status)
    except (ValueError, KeyError, TypeError):
        return Lost(f"the answer is none: status {response.status}")
    if isinstance(e, Refused) and response.status in (429, 503):
        try:
            e.again = max(0.0, float(response.headers.get("Retry-After", "1")))
        except ValueError:
            e.again = 1.0
    return e


def _failure(document: Dict[str, Any], status: int) -> Error:
    failure = document["error"]
    if document["started"] is not False:
        report = document.get("report")
        return Unproven(failure["code"], failure["message"], Report(report) if report else None)
    return Refused(failure["code"], failure["message"], failure.get("hint", ""), status)


class Session(_Calls):
    """A sandbox whose files stay. It ends with the with statement, by end, or when nobody uses it."""

    def __init__(self, client: Client, id: str) -> None:
        self._client, self.id = client, id
        self._path = "/v1/sessions/" + urllib.parse.quote(id, safe="")
        self._exec = self._path + "/exec"

    def exec(
        self, argv: Optional[Sequence[str]] = None, *, code: Optional[str] = None, language: str = "python", stdin: str = "",
        env: Optional[Mapping[str, str]] = None, timeout: float = 30, grace: float = 0, limits: Optional[Mapping[str, Any]] = None,
        files: Optional[Mapping[str, Content]] = None, collect: Sequence[str] = (),
    ) -> Report:
        """Run a command, or a program. Its end is of what it has started alone: files stay."""
        return self._answer(self._run(argv, code, language, stdin, env, timeout, grace, limits, files, collect))

    def write(self, path: str, content: Union[str, bytes]) -> None:
        data = content.encode("utf-8") if isinstance(content, str) else content
        self._client._ask("PUT", self._file(path), data, "application/octet-stream")

    def read(self, path: str) -> bytes:
        return self._client._ask("GET", self._file(path))

    def remove(self, path: str) -> None:
        self._client._ask("DELETE", self._file(path))

    def list(self) -> List[Entry]:
        answer = json.loads(self._client._ask("GET", self._path + "/files"))
        return [Entry(e["path"], e["type"], e["size"]) for e in answer["files"]]

    def end(self) -> None:
        """End it, with all that runs in it. One that has ended already is no error."""
        try:
            self._client._ask("DELETE", self._path)
        except Refused as e:
            if e.code not in ("ended", "no-such-session"):
                raise

    def _file(self, path: str) -> str:
        return self._path + "/files/" + urllib.parse.quote(path)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        self.end()
