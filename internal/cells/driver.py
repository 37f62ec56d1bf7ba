"""Runs cells of code, one after another, in one interpreter.

Descriptor 3 is a socket. A cell arrives as a line of JSON: {"token", "code", "number", "max"}.
Answers are lines of JSON after the cell's token: that it has begun and can be interrupted; its
results; and one end, with the exception if there was one. Each line is preceded by a newline,
because a cell may have written to the socket. Descriptors 0, 1 and 2 belong to the program.
SIGINT interrupts only a running cell. The reader does not trust the answers, because cells run
in this process.
"""
import ast
import base64
import builtins
import json
import linecache
import os
import signal
import sys
import threading
import traceback
import types

SOCKET = 3
FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
COROUTINE = 0x80  # inspect.CO_COROUTINE
TEXT = 32 << 10  # the longest message, and traceback, in characters
RICH = (
    ("_repr_html_", "text/html"), ("_repr_markdown_", "text/markdown"), ("_repr_latex_", "text/latex"), ("_repr_json_", "application/json"),
    ("_repr_svg_", "image/svg+xml"), ("_repr_png_", "image/png"), ("_repr_jpeg_", "image/jpeg"),
)

process = os.getpid()
table, whole = vars(builtins), dict(vars(builtins))
main = types.ModuleType("__main__")
main.__builtins__ = builtins  # not the driver's own table
lock = threading.RLock()
cell = types.SimpleNamespace(token=None, max=0, running=False)
loop = None
streams = [None, None, None]


def send(message):
    """Writes a line. Without a running cell, the caller is a late thread and is ignored."""
    with lock:
        if cell.token is None or os.getpid() != process:
            return
        data = memoryview(f"\n{cell.token} {json.dumps(message)}\n".encode())
        while data:
            data = data[os.write(SOCKET, data):]


def show(kind, value, text=None):
    """Sends a value in all available media types."""
    media = [{"type": "text/plain", "text": repr(value) if text is None else text}]
    for method, name in RICH:
        # Look it up on the type, as Python does: a mock object has every attribute.
        if callable(getattr(type(value), method, None)):
            try:
                media += medium(name, getattr(value, method)())
            except Exception:
                pass  # treated as absent
    result = {"kind": kind, "media": media}
    if len(json.dumps(result)) > cell.max:
        result = {"kind": kind, "media": [{"type": "text/plain", "text": media[0]["text"][:cell.max // 8]}], "truncated": True}
    send({"result": result})


def medium(name, data):
    """Converts the result of a _repr_ method to a list of at most one medium."""
    if isinstance(data, tuple):
        data = data[0]  # the second item is metadata
    if isinstance(data, bytes):
        return [{"type": name, "base64": base64.b64encode(data).decode()}]
    if name == "application/json" and data is not None:
        return [{"type": name, "text": json.dumps(data)}]
    return [{"type": name, "text": data}] if isinstance(data, str) else []


def display(*values):
    for value in values:
        show("display", value)


def figures():
    """Sends matplotlib's figures, if it has been imported."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    for number in pyplot.get_fignums() if pyplot else ():
        import io

        png, figure = io.BytesIO(), pyplot.figure(number)
        figure.savefig(png, format="png")
        pyplot.close(figure)
        send({"result": {"kind": "figure", "media": medium("image/png", png.getvalue())}})


def evaluate(tree, name, mode):
    global loop
    code = compile(tree, name, mode, FLAGS, dont_inherit=True)
    value = eval(code, main.__dict__)
    if not code.co_flags & COROUTINE:
        return value
    import asyncio

    if loop is None or loop.is_closed():
        loop = asyncio.new_event_loop()
    task = loop.create_task(value)
    try:
        return loop.run_until_complete(task)
    finally:
        if not task.done():  # it was interrupted, and would continue in the next cell
            task.cancel()
            loop.run_until_complete(asyncio.gather(task, return_exceptions=True))


MAGICS = """%cd DIR, %env, %env NAME=VALUE, %pwd, %pip, %ls, %time and %%time, %matplotlib, %%bash and %%sh, !COMMAND and NAME = !COMMAND"""


def shell(command, capture=False):
    """Runs a line of shell, as ! does in IPython."""
    import subprocess

    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    done = subprocess.run(command, shell=True, executable="/bin/bash" if os.path.exists("/bin/bash") else None, stdout=subprocess.PIPE if capture else 1, stderr=2)
    if capture:
        return done.stdout.decode(errors="replace").splitlines()
    if done.returncode:
        print(f"exit code {done.returncode}", file=sys.stderr)


def magic(word, rest):
    """Runs a line magic of IPython, as far as there is an equivalent."""
    if word in ("matplotlib", "autoreload", "load_ext", "config"):
        return None  # figures are results anyway
    if word == "cd":
        return os.chdir(os.path.expanduser(rest or "~"))
    if word == "pwd":
        return os.getcwd()
    if word in ("pip", "ls", "cat", "mkdir", "rm", "cp", "mv"):
        return shell(f"{'python3 -m pip' if word == 'pip' else word} {rest}")
    if word in ("env", "set_env"):
        variable, given, value = rest.partition("=")
        if given:
            os.environ[variable.strip()] = value.strip()
            return None
        return os.environ.get(rest.strip()) if rest else dict(os.environ)
    raise SyntaxError(f"%{word} is not supported; cells support {MAGICS}")


def timed(begin):
    import time

    if begin is None:
        return time.perf_counter()
    print(f"Wall time: {time.perf_counter() - begin:.3f} s")


def translated(line):
    """Returns Python for a line of IPython, or None."""
    text = line.lstrip()
    indent = line[:len(line) - len(text)]
    target, assigned, command = text.partition("=")
    if text.startswith("!"):
        return f"{indent}__import__('sys').modules['__cells__'].shell({text[1:].strip()!r})"
    if assigned and target.strip().isidentifier() and command.lstrip().startswith("!"):
        return f"{indent}{target.strip()} = __import__('sys').modules['__cells__'].shell({command.lstrip()[1:].strip()!r}, True)"
    if text.startswith("%") and text[1:2].isalpha():
        word, _, rest = text[1:].partition(" ")
        if word == "time" and rest:
            return f"{indent}_cell_begin = __import__('sys').modules['__cells__'].timed(None); {rest.strip()}; __import__('sys').modules['__cells__'].timed(_cell_begin)"
        return f"{indent}__import__('sys').modules['__cells__'].magic({word!r}, {rest.strip()!r})"
    return None


def parsed(code, name):
    """Parses a cell. Lines that only IPython understands are translated if they are errors in Python."""
    parse = lambda text: compile(text, name, "exec", FLAGS | ast.PyCF_ONLY_AST, dont_inherit=True)
    first, _, rest = code.lstrip().partition("\n")
    if first.startswith("%%"):
        word = first[2:].split()[0] if first[2:].split() else ""
        if word in ("bash", "sh"):
            return parse(f"__import__('sys').modules['__cells__'].shell({rest!r})")
        if word != "time":
            raise SyntaxError(f"%%{word} is not supported; cells support {MAGICS}")
        code = "\n" + rest
    lines = code.split("\n")
    while True:
        try:
            return parse("\n".join(lines))
        except SyntaxError as error:
            number = (error.lineno or 0) - 1
            wrong = [number] if 0 <= number < len(lines) and translated(lines[number]) else [i for i, line in enumerate(lines) if translated(line)]
            if not wrong:
                raise
            for i in wrong:
                lines[i] = translated(lines[i])


def run(code, name):
    """Runs the code, and shows the value of the last line if it is an expression."""
    tree = parsed(code, name)
    begin = timed(None) if code.lstrip().startswith("%%time") else None
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    try:
        evaluate(tree, name, "exec")
        value = evaluate(ast.Expression(last.value), name, "eval") if last else None
        if value is not None:
            main._ = value
            show("value", value)
    except Exception:
        figures()  # they belong to this cell
        raise
    figures()
    if begin is not None:
        timed(begin)


def describe(error):
    """Describes an exception without the driver's frames."""
    said = {"name": type(error).__name__, "message": "", "traceback": ""}
    try:
        frame = error.__traceback__
        while frame and not frame.tb_frame.f_code.co_filename.startswith("<cell "):
            frame = frame.tb_next
        last = frame
        while last and last.tb_next:
            if last.tb_next.tb_frame.f_code is interrupt.__code__:
                last.tb_next = None
            last = last.tb_next
        said["message"] = str(error)[:TEXT]
        said["traceback"] = "".join(traceback.format_exception(type(error), error, frame))[-TEXT:]
    except BaseException:
        pass  # its methods may fail
    return said


def interrupt(number, frame):
    if cell.running:
        cell.running = False  # only once
        raise KeyboardInterrupt


def begin():
    """Restores the standard streams, whatever the previous cell has done to them."""
    for i, mode in enumerate("rww"):
        if streams[i] is None or streams[i].closed:
            streams[i] = open(i, mode, 1, "utf-8", "backslashreplace", closefd=False)
    sys.stdin, sys.stdout, sys.stderr = streams
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = streams


def settle():
    """Flushes the output, and delivers a blocked SIGINT while no cell runs."""
    for stream in (sys.stdout, sys.stderr, streams[1], streams[2]):
        try:
            stream.flush()
        except Exception:
            pass  # closed, or not a stream
    if os.getpid() == process:
        signal.signal(signal.SIGINT, interrupt)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def answer(request):
    """Runs one cell, and returns the message that ends it."""
    name = f"<cell {request['number']}>"
    code = request["code"]
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    end = {"end": True}
    status = 0
    try:
        cell.running = True
        try:
            send({"begun": True})
            run(code, name)
        finally:
            cell.running = False
            table.update(whole)  # the driver's imports use them, too
    except SystemExit as error:
        status = error.code or 0
        if status:
            end["error"] = describe(error)
    except BaseException as error:
        status = 1
        end["error"] = describe(error)
    settle()
    if os.getpid() != process:
        os._exit(status if isinstance(status, int) else 1)  # a child process that returned from the cell
    return end


def serve():
    signal.signal(signal.SIGINT, interrupt)
    os.set_inheritable(SOCKET, False)
    os.environ.setdefault("MPLBACKEND", "Agg")
    sys.modules["__main__"] = main
    main.display = display
    helpers = types.ModuleType("__cells__")
    helpers.shell, helpers.magic, helpers.timed = shell, magic, timed
    sys.modules["__cells__"] = helpers
    sys.argv = [""]
    sys.path.insert(0, "")
    for line in open(SOCKET, "rb", closefd=False):
        request = json.loads(line)
        begin()
        cell.token, cell.max = request["token"], request["max"]
        send(answer(request))
        cell.token = None
    os._exit(0)


serve()
