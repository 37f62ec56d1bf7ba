"""The client for threads."""

from __future__ import annotations

import http.client
import socket
import time
from types import TracebackType
from typing import TYPE_CHECKING, Iterator, List, Optional, Sequence, Tuple, Type, Union

from . import _wire
from ._wire import Cell, Entry, Event, File, Language, Lost, Refused, Report, Request, Status

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._wire import CallOptions, CellOptions, SessionOptions


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


class Client:
    """A server, at unix:PATH, http://HOST:PORT or https://HOST:PORT. Several threads may use one.

    margin is how many seconds longer than a call's own timeout its answer is waited for;
    patience, for how many seconds what was refused for a moment is tried again.
    """

    def __init__(self, address: str, token: str = "", *, margin: float = 60, patience: float = 10) -> None:
        self._address = _wire.Address(address)
        self._token, self._margin, self._patience = token, margin, patience

    def run(self, argv: Optional[Sequence[str]] = None, **options: Unpack[CallOptions]) -> Report:
        """Run a command, or a program, in a fresh sandbox. When this returns nothing of it is left."""
        return Report(_wire.document(self._ask(_wire.run_request("/v1/run", argv, options))))

    def stream(self, argv: Optional[Sequence[str]] = None, **options: Unpack[CallOptions]) -> Iterator[Event]:
        """As run, with the output while it comes. The last event is the report; who stops before ends the call."""
        return self._events(_wire.run_request("/v1/run?stream=1", argv, options))

    def start(self, argv: Optional[Sequence[str]] = None, **options: Unpack[CallOptions]) -> Process:
        """Begin to run a command, or a program, which goes on whether or not anybody waits."""
        return self._start("/v1/calls", _wire.run_request("/v1/calls", argv, options))

    def call(self, id: str) -> Process:
        """What start has begun, by its id."""
        return Process(self, "/v1/calls", id)

    def session(self, **options: Unpack[SessionOptions]) -> Session:
        """Make a sandbox whose files stay from call to call. Use it in a with statement, or end it."""
        return Session(self, _wire.document(self._ask(_wire.session_request(options)))["id"])

    def sessions(self) -> List[Session]:
        return [Session(self, s["id"]) for s in _wire.document(self._ask(Request("GET", "/v1/sessions")))["sessions"]]

    def languages(self) -> List[Language]:
        return _wire.languages(self._ask(Request("GET", "/v1/languages")))

    def store(self, data: Union[str, bytes]) -> str:
        """Put a file into the content store, and return its id."""
        id: str = _wire.document(self._ask(_wire.send_bytes("POST", "/v1/files", data)))["id"]
        return id

    def fetch(self, file: Union[File, str]) -> bytes:
        """Read a file of the content store: one that was collected, or an id."""
        return self._ask(Request("GET", "/v1/files/" + _wire.quoted(file if isinstance(file, str) else file.id)))

    def _start(self, path: str, request: Request) -> Process:
        return Process(self, path, _wire.document(self._ask(request))["id"])

    def _events(self, request: Request) -> Iterator[Event]:
        events = _wire.Events()
        for chunk in self._body(request, 0):
            for event in events.feed(chunk):
                yield event
                if event.report:
                    return
        raise Lost("the stream has no end")

    def _ask(self, request: Request) -> bytes:
        return b"".join(self._body(request, request.wait))

    def _body(self, request: Request, wait: float) -> Iterator[bytes]:
        """Send a request until it is not refused for a moment only. Who stops reading closes the connection."""
        until = time.monotonic() + self._patience
        while True:
            try:
                connection, response = self._once(request, wait + self._margin)
                break
            except Refused as e:
                if e.again is None or time.monotonic() + e.again > until:
                    raise
                pause = e.again
            time.sleep(pause)
        try:
            yield from _received(response)
        finally:
            connection.close()

    def _once(self, request: Request, timeout: float) -> Tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection: http.client.HTTPConnection
        if self._address.path:
            connection = _Unix(self._address.path, timeout)
        elif self._address.tls:
            connection = http.client.HTTPSConnection(self._address.host, self._address.port, timeout=timeout)
        else:
            connection = http.client.HTTPConnection(self._address.host, self._address.port, timeout=timeout)
        try:
            try:
                connection.connect()
            except OSError as e:
                raise Refused("unreachable", f"the server cannot be reached: {e}") from e
            try:
                try:
                    connection.request(request.method, request.path, request.body, request.headers(self._token))
                except (BrokenPipeError, ConnectionResetError):
                    pass  # it may have answered before it has read all, and then it says why
                response = connection.getresponse()
            except (OSError, http.client.HTTPException) as e:
                raise Lost(f"the answer did not come: {e!r}") from e
            if response.status < 300:
                return connection, response
            raise _wire.answered(response.status, response.headers.get("Retry-After"), b"".join(_received(response)))
        except BaseException:
            connection.close()
            raise


def _received(response: http.client.HTTPResponse) -> Iterator[bytes]:
    left = response.length  # read1 says nothing when a body is shorter than this
    while left != 0:
        try:
            chunk = response.read1(1 << 16 if left is None else min(left, 1 << 16))
        except (OSError, http.client.HTTPException) as e:
            raise Lost(f"the answer broke off: {e!r}") from e
        if not chunk:
            if left is None:
                return
            raise Lost("the answer broke off")
        if left is not None:
            left -= len(chunk)
        yield chunk


class Session:
    """A sandbox whose files stay. It ends with the with statement, by end, or when nobody uses it."""

    def __init__(self, client: Client, id: str) -> None:
        self._client, self.id = client, id
        self._path = "/v1/sessions/" + _wire.quoted(id)

    def exec(self, argv: Optional[Sequence[str]] = None, **options: Unpack[CallOptions]) -> Report:
        """Run a command, or a program. Its end is of what it has started alone: files stay."""
        return Report(_wire.document(self._client._ask(_wire.run_request(self._path + "/exec", argv, options))))

    def stream(self, argv: Optional[Sequence[str]] = None, **options: Unpack[CallOptions]) -> Iterator[Event]:
        return self._client._events(_wire.run_request(self._path + "/exec?stream=1", argv, options))

    def cell(self, code: str, **options: Unpack[CellOptions]) -> Cell:
        """Run a cell in an interpreter that the session keeps: what it defines is there for the next one."""
        return Cell(_wire.document(self._client._ask(_wire.run_request(self._path + "/code", None, {**options, "code": code}))))

    def start(self, argv: Optional[Sequence[str]] = None, **options: Unpack[CallOptions]) -> Process:
        """Begin to run a command in the background."""
        path = self._path + "/processes"
        return self._client._start(path, _wire.run_request(path, argv, options))

    def process(self, id: str) -> Process:
        """What start has begun, by its id."""
        return Process(self._client, self._path + "/processes", id)

    def write(self, path: str, content: Union[str, bytes], *, mode: str = "644") -> None:
        self._client._ask(_wire.send_bytes("PUT", self._file(path) + "?mode=" + mode, content))

    def read(self, path: str) -> bytes:
        return self._client._ask(Request("GET", self._file(path)))

    def remove(self, path: str) -> None:
        self._client._ask(Request("DELETE", self._file(path)))

    def list(self) -> List[Entry]:
        return _wire.entries(self._client._ask(Request("GET", self._path + "/files")))

    def pack(self) -> bytes:
        """All files, as a tar archive."""
        return self._client._ask(Request("GET", self._path + "/archive"))

    def unpack(self, archive: bytes) -> None:
        self._client._ask(_wire.send_bytes("PUT", self._path + "/archive", archive, "application/x-tar"))

    def end(self) -> None:
        """End it, with all that runs in it. One that has ended already is no error."""
        try:
            self._client._ask(Request("DELETE", self._path))
        except Refused as e:
            if e.code not in ("ended", "no-such-session"):
                raise

    def _file(self, path: str) -> str:
        return self._path + "/files/" + "/".join(map(_wire.quoted, path.split("/")))

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        self.end()


class Process:
    """A command that nobody waits for: a call, or a process of a session."""

    def __init__(self, client: Client, path: str, id: str) -> None:
        self._client, self.id = client, id
        self._path = path + "/" + _wire.quoted(id)

    def status(self, wait: float = 0) -> Status:
        """How far it has come; with wait, not before its end or that many seconds (60 at most)."""
        return _wire.status(self._client._ask(_wire.status_request(self._path, wait)))

    def wait(self) -> Report:
        """Its report, when it has ended. output has what it has written."""
        while True:
            status = self.status(30)
            if status.error:
                raise status.error
            if status.report:
                return status.report

    def output(self, stream: str = "stdout", offset: int = 0) -> Iterator[bytes]:
        """What it has written, from a byte on, while it comes. A connection that breaks is made again."""
        while True:
            begin = offset
            try:
                for chunk in self._client._body(_wire.output_request(self._path, stream, offset), 0):
                    offset += len(chunk)
                    yield chunk
                return
            except Lost:
                # Without a byte it may have had nothing to write, or the server is gone: then this fails.
                if offset == begin:
                    self.status(1)

    def signal(self, name: str) -> None:
        """Send a signal to all of it; for processes of a session."""
        self._client._ask(_wire.send_json(self._path + "/signal", {"signal": name}))

    def end(self) -> Status:
        """End it, and forget it."""
        return _wire.status(self._client._ask(Request("DELETE", self._path)))
