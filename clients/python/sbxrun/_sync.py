"""The client for threads."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Dict, Generator, List, Optional, Sequence, Set, Tuple, Type, Union

from . import _wire
from ._wire import Cancelled, Cell, Data, Entry, Event, File, Image, Language, Lost, Refused, Report, Request, Status, Stored

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._wire import CallOptions, CellOptions, ProcessOptions, SessionOptions


_BLOCK = 1 << 16  # bytes read at a time from a file to send


class _Unix(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("sbxrun", timeout=timeout, blocksize=_BLOCK)
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


class Cancel:
    """Cancels calls from another thread: pass it to them as cancel, and call it. The calls then raise Cancelled."""

    def __init__(self) -> None:
        self._called = threading.Event()
        self._lock = threading.Lock()
        self._sockets: Set[socket.socket] = set()

    def __call__(self) -> None:
        with self._lock:
            self._called.set()
            for s in self._sockets:
                _shutdown(s)

    def _check(self) -> None:
        if self._called.is_set():
            raise Cancelled("the call was cancelled")

    def _add(self, s: socket.socket) -> None:
        with self._lock:
            self._sockets = {old for old in self._sockets if old.fileno() >= 0}  # without closed ones
            self._sockets.add(s)
            if self._called.is_set():
                _shutdown(s)


def _shutdown(s: socket.socket) -> None:
    """Wake the thread that uses a connection. With TLS, its own method would also change the socket's state."""
    try:
        socket.socket.shutdown(s, socket.SHUT_RDWR)
    except OSError:
        pass  # already closed


class _Unreadable(Exception):
    """Wraps an OSError from reading the file to send, so that it does not look like an error of the connection."""


class _Reading:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        try:
            return self._file.read(size)
        except OSError as e:
            raise _Unreadable from e


class Client:
    """A server, at unix:PATH, http://HOST:PORT or https://HOST:PORT. Several threads may use one.

    margin: seconds to wait for a response in addition to the call's own timeout;
    patience: seconds for which a temporarily refused request is retried;
    node: the node that a gateway forwards all requests to.
    """

    def __init__(self, address: str, token: str = "", *, margin: float = 60, patience: float = 10, node: str = "") -> None:
        self._address = _wire.Address(address)
        self._token, self._margin, self._patience, self._node = token, margin, patience, node

    def run(self, argv: Optional[Sequence[str]] = None, *, cancel: Optional[Cancel] = None, **options: Unpack[CallOptions]) -> Report:
        """Run a command or program in a new sandbox. When this returns, all its processes have exited."""
        return _wire.read(self._ask(_wire.run_request("/v1/run", argv, options), cancel), Report)

    def stream(self, argv: Optional[Sequence[str]] = None, *, cancel: Optional[Cancel] = None, **options: Unpack[CallOptions]) -> Generator[Event, None, None]:
        """Like run, but yields output as it arrives. The last event is the report. Leaving the loop earlier ends the call."""
        return self._events(_wire.run_request("/v1/run?stream=1", argv, options), cancel)

    def start(self, argv: Optional[Sequence[str]] = None, **options: Unpack[CallOptions]) -> Process:
        """Start a command or program that runs in the background."""
        return self._start("/v1/calls", _wire.run_request("/v1/calls", argv, options))

    def call(self, id: str) -> Process:
        """Return the handle of a started command by its ID."""
        return Process(self, "/v1/calls", id)

    def session(self, **options: Unpack[SessionOptions]) -> Session:
        """Create a sandbox that keeps its files between calls. Use it in a with statement, or call end."""
        return Session(self, _wire.identity(self._ask(_wire.session_request(options))))

    def sessions(self) -> List[Session]:
        return [Session(self, id) for id in _wire.identities(self._ask(Request("GET", "/v1/sessions")))]

    def snapshots(self) -> List[Dict[str, Any]]:
        return _wire.snapshots(self._ask(Request("GET", "/v1/snapshots")))

    def remove_snapshot(self, id: str) -> None:
        """Remove a snapshot by its ID or name."""
        self._ask(Request("DELETE", "/v1/snapshots/" + _wire.quoted(id)))

    def languages(self) -> List[Language]:
        return _wire.languages(self._ask(Request("GET", "/v1/languages")))

    def images(self) -> List[Image]:
        return _wire.images(self._ask(Request("GET", "/v1/images")))

    def store(self, data: Data) -> str:
        """Store a file in the content store and return its ID."""
        id: str = _wire.identity(self._ask(_wire.send_bytes("POST", "/v1/files", data)))
        return id

    def files(self) -> List[Stored]:
        """List the content store, least recently used first."""
        return _wire.stored(self._ask(Request("GET", "/v1/files")))

    def remove_file(self, id: str) -> None:
        """Remove a file from the content store."""
        self._ask(Request("DELETE", "/v1/files/" + _wire.quoted(id)))

    def fetch(self, file: Union[File, str]) -> bytes:
        """Read a file from the content store: a collected file or an ID."""
        return self._ask(_wire.fetch_request(file))

    def fetch_stream(self, file: Union[File, str]) -> Generator[bytes, None, None]:
        """Like fetch, but yields pieces as they arrive."""
        return self._body(_wire.fetch_request(file), 0)

    def _start(self, path: str, request: Request) -> Process:
        return Process(self, path, _wire.identity(self._ask(request)))

    def _events(self, request: Request, cancel: Optional[Cancel] = None) -> Generator[Event, None, None]:
        events = _wire.Events()
        with contextlib.closing(self._body(request, _wire.KEEPALIVE, cancel)) as body:
            for chunk in body:
                for event in events.feed(chunk):
                    yield event
                    if event.report:
                        return
        raise Lost("the stream ended without a report")

    def _ask(self, request: Request, cancel: Optional[Cancel] = None) -> bytes:
        return b"".join(self._body(request, request.wait, cancel))

    def _body(self, request: Request, wait: float, cancel: Optional[Cancel] = None) -> Generator[bytes, None, None]:
        """Send a request, retrying while it is refused temporarily. Closing the generator closes the connection."""
        if cancel is None:
            cancel = Cancel()
        retries = _wire.Retries(self._patience, time.monotonic())
        try:
            while True:
                cancel._check()
                try:
                    connection, response = self._once(request, min(wait + self._margin, _wire.LONGEST_WAIT), cancel)
                    break
                except Refused as e:
                    pause = retries.pause(e, request, time.monotonic())
                cancel._called.wait(pause)
            try:
                yield from _received(response)
            finally:
                response.close()
                connection.close()
        except (Lost, Refused):
            cancel._check()
            raise

    def _once(self, request: Request, timeout: float, cancel: Cancel) -> Tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        headers = request.headers(self._token, self._node)
        body = request.body if isinstance(request.body, (bytes, type(None))) else _Reading(request.body)
        connection: http.client.HTTPConnection
        if self._address.path:
            connection = _Unix(self._address.path, timeout)
        elif self._address.tls:
            connection = http.client.HTTPSConnection(self._address.host, self._address.port, timeout=timeout, blocksize=_BLOCK)
        else:
            connection = http.client.HTTPConnection(self._address.host, self._address.port, timeout=timeout, blocksize=_BLOCK)
        try:
            try:
                connection.connect()
            except OSError as e:
                raise Refused("unreachable", f"the server cannot be reached: {e}") from e
            cancel._add(connection.sock)
            try:
                try:
                    connection.request(request.method, request.path, body, headers)
                except (BrokenPipeError, ConnectionResetError):
                    pass  # the server may have answered before it read the whole request
                response = connection.getresponse()
            except (OSError, http.client.HTTPException) as e:
                raise Lost(f"the answer did not arrive: {e!r}") from e
            if response.status < 300:
                return connection, response
            with response:
                raise _wire.answered(response.status, response.headers.get("Retry-After"), b"".join(_received(response)))
        except _Unreadable as e:
            connection.close()
            assert e.__cause__
            raise e.__cause__ from None
        except BaseException:
            connection.close()
            raise


def _received(response: http.client.HTTPResponse) -> Generator[bytes, None, None]:
    left = response.length  # read1 does not report a body shorter than this
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
    """A sandbox that keeps its files. It ends with the with statement, with end(), or after its idle timeout."""

    def __init__(self, client: Client, id: str) -> None:
        self._client, self.id = client, id
        self._path = "/v1/sessions/" + _wire.quoted(id)

    def exec(self, argv: Optional[Sequence[str]] = None, *, cancel: Optional[Cancel] = None, **options: Unpack[CallOptions]) -> Report:
        """Run a command or program. Its processes end with it; its files stay."""
        return _wire.read(self._client._ask(_wire.run_request(self._path + "/exec", argv, options), cancel), Report)

    def stream(self, argv: Optional[Sequence[str]] = None, *, cancel: Optional[Cancel] = None, **options: Unpack[CallOptions]) -> Generator[Event, None, None]:
        return self._client._events(_wire.run_request(self._path + "/exec?stream=1", argv, options), cancel)

    def cell(self, code: str, *, cancel: Optional[Cancel] = None, **options: Unpack[CellOptions]) -> Cell:
        """Run a cell in the session's interpreter, which keeps definitions for the next cell."""
        return _wire.read(self._client._ask(_wire.run_request(self._path + "/code", None, {**options, "code": code}), cancel), Cell)

    def start(self, argv: Optional[Sequence[str]] = None, **options: Unpack[ProcessOptions]) -> Process:
        """Start a command in the background. Without a timeout it runs until it exits or the session ends."""
        path = self._path + "/processes"
        return self._client._start(path, _wire.run_request(path, argv, options, timeout=0))

    def process(self, id: str) -> Process:
        """Return the handle of a started command by its ID."""
        return Process(self._client, self._path + "/processes", id)

    def write(self, path: str, content: Data, *, mode: str = "644") -> None:
        self._client._ask(_wire.send_bytes("PUT", self._file(path) + "?mode=" + _wire.quoted(mode), content))

    def read(self, path: str) -> bytes:
        return self._client._ask(Request("GET", self._file(path)))

    def read_stream(self, path: str) -> Generator[bytes, None, None]:
        """Like read, but yields pieces as they arrive."""
        return self._client._body(Request("GET", self._file(path)), 0)

    def remove(self, path: str) -> None:
        self._client._ask(Request("DELETE", self._file(path)))

    def list(self) -> List[Entry]:
        return _wire.entries(self._client._ask(Request("GET", self._path + "/files")))

    def pack(self) -> bytes:
        """Read all files as a tar archive."""
        return self._client._ask(Request("GET", self._path + "/archive"))

    def pack_stream(self) -> Generator[bytes, None, None]:
        """Like pack, but yields pieces as they arrive."""
        return self._client._body(Request("GET", self._path + "/archive"), 0)

    def unpack(self, archive: Union[bytes, BinaryIO]) -> None:
        self._client._ask(_wire.send_bytes("PUT", self._path + "/archive", archive, "application/x-tar"))

    def diff(self) -> Dict[str, Any]:
        """Return the changes in the session's overlay."""
        return _wire.document(self._client._ask(Request("GET", self._path + "/diff")))

    def snapshot(self, name: str = "", ttl: float = 0) -> Dict[str, Any]:
        """Take a snapshot of the session's overlay; ttl is in seconds."""
        return _wire.document(self._client._ask(_wire.snapshot_request(self._path, name, ttl)))

    def end(self) -> None:
        """End the session and everything in it. A session that has already ended is not an error."""
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
    """A background command: an asynchronous call, or a process of a session."""

    def __init__(self, client: Client, path: str, id: str) -> None:
        self._client, self.id = client, id
        self._path = path + "/" + _wire.quoted(id)

    def status(self, wait: float = 0) -> Status:
        """Return the current state. With wait, return when the command ends or after that many seconds (at most 60)."""
        return _wire.status(self._client._ask(_wire.status_request(self._path, wait)))

    def wait(self) -> Report:
        """Wait for the end and return the report. Its output is in output()."""
        while True:
            status = self.status(30)
            if status.error:
                raise status.error
            if status.report:
                return status.report
            time.sleep(_wire.LEAST_PAUSE)  # the server has usually waited 30 s

    def output(self, stream: str = "stdout", offset: int = 0) -> Generator[bytes, None, None]:
        """Yield the output from a byte offset on, as it arrives. Reconnects after a broken connection."""
        while True:
            begin = offset
            try:
                for chunk in self._client._body(_wire.output_request(self._path, stream, offset), 0):
                    offset += len(chunk)
                    yield chunk
                return
            except Lost:
                # No byte arrived: there is no output yet, or the server is gone and this call fails.
                if offset == begin:
                    self.status(1)
                time.sleep(_wire.LEAST_PAUSE)

    def send(self, data: Union[str, bytes], *, end: bool = False) -> None:
        """Write to the stdin of a process that was started with keep_stdin; end closes it.

        Returns when the process has read everything except what fits into a pipe.
        If the process reads nothing for as long as the margin, this raises Lost, and part of the data may have been written.
        """
        self._client._ask(_wire.stdin_request(self._path, data, end))

    def signal(self, name: str) -> None:
        """Signal all its processes. Works only for processes of a session."""
        self._client._ask(_wire.send_json(self._path + "/signal", {"signal": name}))

    def end(self) -> Status:
        """End the command and discard its record."""
        return _wire.status(self._client._ask(Request("DELETE", self._path)))
