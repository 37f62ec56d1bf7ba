"""The client for asyncio. Cancelling a task disconnects, and the server ends the call."""

from __future__ import annotations

import asyncio
import http.client
import io
from types import TracebackType
from typing import TYPE_CHECKING, Any, AsyncGenerator, BinaryIO, Coroutine, Dict, List, Optional, Sequence, Tuple, Type, Union

from . import _wire
from ._wire import Cell, Data, Entry, Event, File, Image, Language, Lost, Refused, Report, Request, Status, Stored

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._wire import CallOptions, CellOptions, ProcessOptions, SessionOptions


class AsyncClient:
    """Like Client. Streams are asynchronous generators; leave one at once with contextlib.aclosing."""

    def __init__(self, address: str, token: str = "", *, margin: float = 60, patience: float = 10, node: str = "") -> None:
        self._address = _wire.Address(address)
        self._token, self._margin, self._patience, self._node = token, margin, patience, node

    async def run(self, argv: Optional[Sequence[str]] = None, **options: Unpack[CallOptions]) -> Report:
        """Run a command or program in a new sandbox. When this returns, all its processes have exited."""
        return _wire.read(await self._ask(_wire.run_request("/v1/run", argv, options)), Report)

    def stream(self, argv: Optional[Sequence[str]] = None, **options: Unpack[CallOptions]) -> AsyncGenerator[Event, None]:
        """Like run, but yields output as it arrives. The last event is the report. Leaving the loop earlier ends the call."""
        return self._events(_wire.run_request("/v1/run?stream=1", argv, options))

    async def start(self, argv: Optional[Sequence[str]] = None, **options: Unpack[CallOptions]) -> AsyncProcess:
        """Start a command or program that runs in the background."""
        return await self._start("/v1/calls", _wire.run_request("/v1/calls", argv, options))

    def call(self, id: str) -> AsyncProcess:
        """Return the handle of a started command by its ID."""
        return AsyncProcess(self, "/v1/calls", id)

    async def session(self, **options: Unpack[SessionOptions]) -> AsyncSession:
        """Create a sandbox that keeps its files between calls. Use ``async with await client.session()``, or call end."""
        return AsyncSession(self, _wire.identity(await self._ask(_wire.session_request(options))))

    async def sessions(self) -> List[AsyncSession]:
        return [AsyncSession(self, id) for id in _wire.identities(await self._ask(Request("GET", "/v1/sessions")))]

    async def snapshots(self) -> List[Dict[str, Any]]:
        return _wire.snapshots(await self._ask(Request("GET", "/v1/snapshots")))

    async def remove_snapshot(self, id: str) -> None:
        """Remove a snapshot by its ID or name."""
        await self._ask(Request("DELETE", "/v1/snapshots/" + _wire.quoted(id)))

    async def languages(self) -> List[Language]:
        return _wire.languages(await self._ask(Request("GET", "/v1/languages")))

    async def images(self) -> List[Image]:
        return _wire.images(await self._ask(Request("GET", "/v1/images")))

    async def store(self, data: Data) -> str:
        """Store a file in the content store and return its ID."""
        id: str = _wire.identity(await self._ask(_wire.send_bytes("POST", "/v1/files", data)))
        return id

    async def files(self) -> List[Stored]:
        """List the content store, least recently used first."""
        return _wire.stored(await self._ask(Request("GET", "/v1/files")))

    async def remove_file(self, id: str) -> None:
        """Remove a file from the content store."""
        await self._ask(Request("DELETE", "/v1/files/" + _wire.quoted(id)))

    async def fetch(self, file: Union[File, str]) -> bytes:
        """Read a file from the content store: a collected file or an ID."""
        return await self._ask(_wire.fetch_request(file))

    def fetch_stream(self, file: Union[File, str]) -> AsyncGenerator[bytes, None]:
        """Like fetch, but yields pieces as they arrive."""
        return self._pieces(_wire.fetch_request(file))

    async def _start(self, path: str, request: Request) -> AsyncProcess:
        return AsyncProcess(self, path, _wire.identity(await self._ask(request)))

    async def _events(self, request: Request) -> AsyncGenerator[Event, None]:
        events = _wire.Events()
        connection = await self._send(request, _wire.KEEPALIVE)
        try:
            async for chunk in connection.body():
                for event in events.feed(chunk):
                    yield event
                    if event.report:
                        return
            raise Lost("the stream ended without a report")
        finally:
            connection.close()

    async def _ask(self, request: Request) -> bytes:
        connection = await self._send(request, request.wait)
        try:
            return await connection.all()
        finally:
            connection.close()

    async def _pieces(self, request: Request) -> AsyncGenerator[bytes, None]:
        connection = await self._send(request, 0)
        try:
            async for chunk in connection.body():
                yield chunk
        finally:
            connection.close()

    async def _send(self, request: Request, wait: float) -> _Connection:
        """Send a request, retrying while it is refused temporarily."""
        clock = asyncio.get_running_loop().time
        retries = _wire.Retries(self._patience, clock())
        while True:
            try:
                return await self._once(request, min(wait + self._margin, _wire.LONGEST_WAIT))
            except Refused as e:
                pause = retries.pause(e, request, clock())
            await asyncio.sleep(pause)

    async def _once(self, request: Request, timeout: float) -> _Connection:
        address, loop = self._address, asyncio.get_running_loop()
        headers = request.headers(self._token, self._node)

        def made() -> _Connection:
            return _Connection(timeout)

        try:
            if address.path:
                connection = await _made(loop.create_unix_connection(made, sock=_wire.unix_socket(address.path)), timeout)
            else:
                connection = await _made(loop.create_connection(made, address.host, address.port, ssl=address.tls or None), timeout)
        except (OSError, asyncio.TimeoutError) as e:
            raise Refused("unreachable", f"the server cannot be reached: {e}") from e
        try:
            body = request.body or b""
            length = {"Content-Length": str(len(body))} if isinstance(body, bytes) else {"Transfer-Encoding": "chunked"}
            headers = {"Host": address.netloc, **headers, **length}
            head = f"{request.method} {request.path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "\r\n"
            await connection.exchange(head.encode("latin-1"), body)
            if connection.status < 300:
                return connection
            raise _wire.answered(connection.status, connection.headers.get("Retry-After"), await connection.all())
        except BaseException:
            connection.close()
            raise


class _Connection(asyncio.Protocol):
    """One request and its answer. asyncio's streams would withhold data received before a connection was reset."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._received = bytearray()
        self._over = False
        self._sent = 0  # pieces of the request
        self._changed, self._writable = asyncio.Event(), asyncio.Event()
        self._writable.set()
        self.status = 0
        self.headers = http.client.HTTPMessage()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._changed.set()
        if len(self._received) > 1 << 18:
            self._transport.pause_reading()

    def connection_lost(self, exc: Optional[Exception]) -> None:
        # After a failed write, asyncio stops reading. But the server may have answered before it read the whole
        # request, and its answer has the reason.
        if isinstance(exc, (BrokenPipeError, ConnectionResetError)) and not self._transport.get_extra_info("sslcontext"):
            with self._transport.get_extra_info("socket").dup() as rest:
                rest.setblocking(False)
                try:
                    while chunk := rest.recv(1 << 16):
                        self._received += chunk
                except OSError:
                    pass  # no more data
        self._over = True
        self._changed.set()
        self._writable.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def close(self) -> None:
        self._transport.abort()

    async def exchange(self, head: bytes, body: Union[bytes, BinaryIO]) -> None:
        """Send a request and read the head of the answer. If that comes before everything is sent, the rest is not sent."""
        sending = asyncio.ensure_future(self._send(head, body))

        def sent(_: object) -> None:
            if not sending.cancelled() and sending.exception():
                self.close()

        sending.add_done_callback(sent)
        try:
            lines = io.BytesIO(await self._until(b"\r\n\r\n"))
        except Lost:
            if sending.done():
                sending.result()  # raises the error of reading the file
            raise
        finally:
            sending.cancel()
        try:
            self.status = int(lines.readline().split()[1])
            self.headers = http.client.parse_headers(lines)
        except (ValueError, IndexError, http.client.HTTPException) as e:
            raise Lost("no valid answer") from e

    async def all(self) -> bytes:
        return b"".join([chunk async for chunk in self.body()])

    async def body(self) -> AsyncGenerator[bytes, None]:
        length = self.headers.get("Content-Length")
        try:
            if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
                while True:
                    left = int((await self._until(b"\r\n")).split(b";")[0], 16)
                    if left == 0:
                        return
                    async for chunk in self._part(left):
                        yield chunk
                    await self._until(b"\r\n")
            elif length is not None:
                async for chunk in self._part(int(length)):
                    yield chunk
            elif self.status != 204:
                while self._received or await self._more():
                    yield self._take(1 << 16)
        except ValueError as e:
            raise Lost("no valid answer") from e

    async def _send(self, head: bytes, body: Union[bytes, BinaryIO]) -> None:
        pieces = _slices(body) if isinstance(body, bytes) else _chunks(body)
        async for piece in pieces:
            await self._writable.wait()
            if self._over or self._transport.is_closing():
                return
            self._transport.write(head + piece)
            self._sent += 1
            head = b""

    async def _part(self, left: int) -> AsyncGenerator[bytes, None]:
        if left < 0:
            raise Lost("no valid answer: a negative length")
        while left:
            if not self._received and not await self._more():
                raise Lost("the answer broke off")
            chunk = self._take(left)
            left -= len(chunk)
            yield chunk

    async def _until(self, end: bytes) -> bytes:
        """Read a head or a line. No server sends long ones."""
        while end not in self._received:
            if len(self._received) > 1 << 16:
                raise Lost("no valid answer: a line is too long")
            if not await self._more():
                raise Lost("the answer did not arrive, or broke off")
        return self._take(self._received.index(end) + len(end))

    def _take(self, most: int) -> bytes:
        taken = bytes(self._received[:most])
        del self._received[:most]
        return taken

    async def _more(self) -> bool:
        """Wait for more data. Returns false if there will be none."""
        had = len(self._received)
        self._transport.resume_reading()
        while len(self._received) == had and not self._over:
            self._changed.clear()
            sent, late = self._sent, asyncio.Event()
            timer = asyncio.get_running_loop().call_later(self._timeout, lambda: (late.set(), self._changed.set()))  # not wait_for: see _made
            try:
                await self._changed.wait()
            finally:
                timer.cancel()
            if len(self._received) == had and not self._over and self._sent == sent and late.is_set():
                raise Lost("the answer did not arrive in time")
        return len(self._received) > had


async def _made(making: Coroutine[Any, Any, Tuple[Any, _Connection]], timeout: float) -> _Connection:
    """Wait for a connection. asyncio.wait_for drops a cancellation that comes at the same time as the result (until Python 3.12)."""
    task = asyncio.ensure_future(making)
    try:
        if not (await asyncio.wait({task}, timeout=timeout))[0]:
            raise asyncio.TimeoutError("no connection in time")
        return task.result()[1]
    except BaseException:
        task.cancel()
        task.add_done_callback(_abort)
        raise


def _abort(task: asyncio.Task[Tuple[Any, _Connection]]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result()[0].abort()


async def _slices(body: bytes) -> AsyncGenerator[bytes, None]:
    for at in range(0, len(body) or 1, 1 << 16):
        yield body[at : at + (1 << 16)]


async def _chunks(file: BinaryIO) -> AsyncGenerator[bytes, None]:
    """The content of a file in chunked encoding, because its length is unknown. Another thread reads it, because reading may block."""
    piece = b"more"
    while piece:
        piece = await asyncio.get_running_loop().run_in_executor(None, file.read, 1 << 16)
        yield b"%x\r\n%b\r\n" % (len(piece), piece)  # an empty chunk is the last


class AsyncSession:
    """A sandbox that keeps its files. It ends with the async with statement, with end(), or after its idle timeout."""

    def __init__(self, client: AsyncClient, id: str) -> None:
        self._client, self.id = client, id
        self._path = "/v1/sessions/" + _wire.quoted(id)

    async def exec(self, argv: Optional[Sequence[str]] = None, **options: Unpack[CallOptions]) -> Report:
        """Run a command or program. Its processes end with it; its files stay."""
        return _wire.read(await self._client._ask(_wire.run_request(self._path + "/exec", argv, options)), Report)

    def stream(self, argv: Optional[Sequence[str]] = None, **options: Unpack[CallOptions]) -> AsyncGenerator[Event, None]:
        return self._client._events(_wire.run_request(self._path + "/exec?stream=1", argv, options))

    async def cell(self, code: str, **options: Unpack[CellOptions]) -> Cell:
        """Run a cell in the session's interpreter, which keeps definitions for the next cell."""
        return _wire.read(await self._client._ask(_wire.run_request(self._path + "/code", None, {**options, "code": code})), Cell)

    async def start(self, argv: Optional[Sequence[str]] = None, **options: Unpack[ProcessOptions]) -> AsyncProcess:
        """Start a command in the background. Without a timeout it runs until it exits or the session ends."""
        path = self._path + "/processes"
        return await self._client._start(path, _wire.run_request(path, argv, options, timeout=0))

    def process(self, id: str) -> AsyncProcess:
        """Return the handle of a started command by its ID."""
        return AsyncProcess(self._client, self._path + "/processes", id)

    async def write(self, path: str, content: Data, *, mode: str = "644") -> None:
        await self._client._ask(_wire.send_bytes("PUT", self._file(path) + "?mode=" + _wire.quoted(mode), content))

    async def read(self, path: str) -> bytes:
        return await self._client._ask(Request("GET", self._file(path)))

    def read_stream(self, path: str) -> AsyncGenerator[bytes, None]:
        """Like read, but yields pieces as they arrive."""
        return self._client._pieces(Request("GET", self._file(path)))

    async def remove(self, path: str) -> None:
        await self._client._ask(Request("DELETE", self._file(path)))

    async def list(self) -> List[Entry]:
        return _wire.entries(await self._client._ask(Request("GET", self._path + "/files")))

    async def pack(self) -> bytes:
        """Read all files as a tar archive."""
        return await self._client._ask(Request("GET", self._path + "/archive"))

    def pack_stream(self) -> AsyncGenerator[bytes, None]:
        """Like pack, but yields pieces as they arrive."""
        return self._client._pieces(Request("GET", self._path + "/archive"))

    async def unpack(self, archive: Union[bytes, BinaryIO]) -> None:
        await self._client._ask(_wire.send_bytes("PUT", self._path + "/archive", archive, "application/x-tar"))

    async def diff(self) -> Dict[str, Any]:
        """Return the changes in the session's overlay."""
        return _wire.document(await self._client._ask(Request("GET", self._path + "/diff")))

    async def snapshot(self, name: str = "", ttl: float = 0) -> Dict[str, Any]:
        """Take a snapshot of the session's overlay; ttl is in seconds."""
        return _wire.document(await self._client._ask(_wire.snapshot_request(self._path, name, ttl)))

    async def end(self) -> None:
        """End the session and everything in it. A session that has already ended is not an error."""
        try:
            await self._client._ask(Request("DELETE", self._path))
        except Refused as e:
            if e.code not in ("ended", "no-such-session"):
                raise

    def _file(self, path: str) -> str:
        return self._path + "/files/" + "/".join(map(_wire.quoted, path.split("/")))

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        await self.end()


class AsyncProcess:
    """A background command: an asynchronous call, or a process of a session."""

    def __init__(self, client: AsyncClient, path: str, id: str) -> None:
        self._client, self.id = client, id
        self._path = path + "/" + _wire.quoted(id)

    async def status(self, wait: float = 0) -> Status:
        """Return the current state. With wait, return when the command ends or after that many seconds (at most 60)."""
        return _wire.status(await self._client._ask(_wire.status_request(self._path, wait)))

    async def wait(self) -> Report:
        """Wait for the end and return the report. Its output is in output()."""
        while True:
            status = await self.status(30)
            if status.error:
                raise status.error
            if status.report:
                return status.report
            await asyncio.sleep(_wire.LEAST_PAUSE)  # the server has usually waited 30 s

    async def output(self, stream: str = "stdout", offset: int = 0) -> AsyncGenerator[bytes, None]:
        """Yield the output from a byte offset on, as it arrives. Reconnects after a broken connection."""
        while True:
            begin = offset
            try:
                connection = await self._client._send(_wire.output_request(self._path, stream, offset), 0)
                try:
                    async for chunk in connection.body():
                        offset += len(chunk)
                        yield chunk
                finally:
                    connection.close()
                return
            except Lost:
                # No byte arrived: there is no output yet, or the server is gone and this call fails.
                if offset == begin:
                    await self.status(1)
                await asyncio.sleep(_wire.LEAST_PAUSE)

    async def send(self, data: Union[str, bytes], *, end: bool = False) -> None:
        """Write to the stdin of a process that was started with keep_stdin; end closes it.

        Returns when the process has read everything except what fits into a pipe.
        If the process reads nothing for as long as the margin, this raises Lost, and part of the data may have been written.
        """
        await self._client._ask(_wire.stdin_request(self._path, data, end))

    async def signal(self, name: str) -> None:
        """Signal all its processes. Works only for processes of a session."""
        await self._client._ask(_wire.send_json(self._path + "/signal", {"signal": name}))

    async def end(self) -> Status:
        """End the command and discard its record."""
        return _wire.status(await self._client._ask(Request("DELETE", self._path)))
