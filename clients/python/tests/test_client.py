"""Tests of the client. SBXRUN_SOCKET is that of a server; what a server does not do at will, a fake does."""

import ast
import json
import os
import pathlib
import socket
import threading
import time
import unittest

import sbxrun

ADDRESS = "unix:" + os.environ["SBXRUN_SOCKET"]
REPORT = {"id": "1", "cause": "exited", "exit_code": 0, "timed_out": False, "teardown": {"verdict": "proven"}}


class Server(unittest.TestCase):
    def setUp(self):
        self.client = sbxrun.Client(ADDRESS)

    def test_run(self):
        r = self.client.run(["sh", "-c", "cat; echo $A; echo err >&2; exit 3"], stdin="in ", env={"A": "b"})
        self.assertEqual((r.cause, r.exit_code, r.stdout, r.stderr, r.timed_out, r.proven), ("exited", 3, "in b\n", "err\n", False, True))
        self.assertEqual(self.client.run(code="print(6*7)").stdout, "42\n")
        self.assertEqual(self.client.run(["printf", r"\377\001"]).raw("stdout"), b"\xff\x01")

    def test_timeout_is_a_report(self):
        began = time.monotonic()
        r = self.client.run(["sh", "-c", "sleep 1000 & sleep 1000"], timeout=0.3)
        self.assertEqual((r.cause, r.exit_code, r.timed_out), ("timeout", 124, True))
        self.assertLess(time.monotonic() - began, 20)

    def test_not_found_is_a_report(self):
        self.assertEqual(self.client.run(["no-such-command"]).exit_code, 127)

    def test_files(self):
        r = self.client.run(["sh", "-c", "cat a b >c.out"], files={"a": "x", "b": b"\xff"}, collect=["*.out"])
        self.assertEqual([(f.path, f.size, f.error) for f in r.files], [("c.out", 2, "")])
        self.assertEqual(self.client.fetch(r.files[0]), b"x\xff")
        self.assertEqual(self.client.run(["cat", "d"], files={"d": r.files[0]}).raw("stdout"), b"x\xff")
        self.assertEqual(self.client.fetch(self.client.store(b"y")), b"y")

    def test_session(self):
        with self.client.session(files={"given": "1"}) as s:
            s.write("d/ü %?#.txt", "text")
            self.assertEqual(s.exec(["sh", "-c", "cat given d/*; echo 2 >made"]).stdout, "1text")
            self.assertEqual(s.read("made"), b"2\n")
            self.assertEqual(s.read("d/ü %?#.txt"), b"text")
            self.assertEqual({e.path: e.type for e in s.list()}, {"given": "file", "made": "file", "d": "directory", "d/ü %?#.txt": "file"})
            s.remove("made")
            with self.assertRaises(sbxrun.Refused) as e:
                s.read("made")
            self.assertEqual((e.exception.code, e.exception.status), ("no-such-file", 404))
            self.assertEqual([e.data for e in s.stream(["echo", "a"])], [b"a\n", b""])
        s.end()
        with self.assertRaises(sbxrun.Refused) as e:
            s.exec(["true"])
        self.assertEqual(e.exception.code, "ended")

    def test_stream(self):
        events = list(self.client.stream(["sh", "-c", r"echo ü; sleep 0.1; printf '\377' >&2; exit 4"]))
        self.assertEqual([(e.name, e.data) for e in events[:-1]], [("stdout", "ü\n".encode()), ("stderr", b"\xff")])
        self.assertEqual((events[-1].name, events[-1].report.exit_code), ("report", 4))

    def test_leaving_a_stream_ends_the_call(self):
        with self.client.session() as s:
            for event in s.stream(["sh", "-c", "while :; do date +%s%N >new; mv new beat; echo up; sleep 0.01; done"], timeout=60):
                if event.name == "stdout":
                    break
            deadline = time.monotonic() + 30
            last = None
            while last != (beat := s.read("beat")) or not beat:  # it stands still
                self.assertLess(time.monotonic(), deadline)
                last = beat
                time.sleep(0.5)

    def test_refused(self):
        for call, code in ((dict(argv=[]), "usage"), (dict(code="1", language="cobol"), "usage"), (dict(argv=["a\0b"]), "usage"),
                           (dict(argv=["true"], files={"../a": ""}), "usage")):
            with self.assertRaises(sbxrun.Refused) as e:
                self.client.run(**call)
            self.assertEqual(e.exception.code, code)
        with self.assertRaises(sbxrun.Refused):
            self.client.stream(["true"], files={"/a": ""}).__next__()
        for wrong in (dict(), dict(argv=["true"], code="1"), dict(argv=["true"], timeout=0)):
            with self.assertRaises(ValueError):
                self.client.run(**wrong)
        with self.assertRaises(TypeError):
            self.client.run("true")

    def test_unreachable(self):
        with self.assertRaises(sbxrun.Refused) as e:
            sbxrun.Client("unix:/no/such/socket").run(["true"])
        self.assertEqual(e.exception.code, "unreachable")

    def test_threads(self):
        answers = {}
        threads = [threading.Thread(target=lambda n=n: answers.update({n: self.client.run(["echo", str(n)]).stdout})) for n in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual(answers, {n: f"{n}\n" for n in range(8)})


class Fake(unittest.TestCase):
    """What a server answers that fails."""

    def serve(self, *answers):
        """Answer each request with the next of these, and count them; None is never answered."""
        listener = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(listener.close)
        self.asked = 0
        held = []

        def answer():
            for a in answers:
                try:
                    c, _ = listener.accept()
                except OSError:
                    return
                self.asked += 1
                c.recv(1 << 16)
                if a is None:
                    held.append(c)
                    continue
                c.sendall(a)
                c.close()

        threading.Thread(target=answer, daemon=True).start()
        self.addCleanup(lambda: [c.close() for c in held])
        return "http://127.0.0.1:%d" % listener.getsockname()[1]

    @staticmethod
    def answer(status, body, *headers):
        text = json.dumps(body).encode()
        lines = [f"HTTP/1.1 {status} X", "Content-Type: application/json", f"Content-Length: {len(text)}", *headers]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + text

    @staticmethod
    def error(code, started):
        return {"error": {"code": code, "message": "m"}, "started": started}

    def test_tries_again_what_has_not_started(self):
        for status, code in ((503, "busy"), (429, "quota")):
            address = self.serve(self.answer(status, self.error(code, False), "Retry-After: 0.01"), self.answer(200, REPORT))
            self.assertEqual(sbxrun.Client(address).run(["true"]).exit_code, 0)
            self.assertEqual(self.asked, 2)

    def test_not_for_ever(self):
        address = self.serve(*[self.answer(503, self.error("busy", False), "Retry-After: 0.1")] * 100)
        with self.assertRaises(sbxrun.Refused):
            sbxrun.Client(address, patience=0.35).run(["true"])
        self.assertIn(self.asked, range(2, 6))

    def test_never_what_has_started(self):
        unproven = dict(self.error("unproven", True), report=dict(REPORT, teardown={"verdict": "unproven"}))
        for text, error in ((self.answer(500, unproven), sbxrun.Unproven), (self.answer(503, self.error("busy", True)), sbxrun.Unproven),
                            (self.answer(503, {}), sbxrun.Lost), (self.answer(502, "bad gateway"), sbxrun.Lost),
                            (self.answer(400, self.error("usage", False)), sbxrun.Refused), (b"", sbxrun.Lost),
                            (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", sbxrun.Lost)):
            address = self.serve(text, self.answer(200, REPORT))
            with self.assertRaises(error) as e:
                sbxrun.Client(address).run(["true"])
            self.assertEqual(self.asked, 1, text)
            if error is sbxrun.Unproven and e.exception.report:
                self.assertFalse(e.exception.report.proven)

    def test_reads_with_a_timeout(self):
        address = self.serve(None, None)
        began = time.monotonic()
        with self.assertRaises(sbxrun.Lost):
            sbxrun.Client(address, margin=0.2).run(["true"], timeout=0.1)
        self.assertGreaterEqual(time.monotonic() - began, 0.3)
        with self.assertRaises(sbxrun.Lost):
            list(sbxrun.Client(address, margin=0.2).stream(["true"], timeout=0.1))
        self.assertEqual(self.asked, 2)
        self.assertLess(time.monotonic() - began, 20)

    def test_stream_without_a_report(self):
        lines = b'{"event":"start","id":"1"}\n{"event":"stdout","text":"a"}\n'
        address = self.serve(b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nConnection: close\r\n\r\n" + lines)
        seen = []
        with self.assertRaises(sbxrun.Lost):
            for event in sbxrun.Client(address).stream(["true"]):
                seen.append(event.data)
        self.assertEqual(seen, [b"a"])


class Source(unittest.TestCase):
    def test_is_python_3_9(self):
        name = pathlib.Path(sbxrun.__file__)
        ast.parse(name.read_text(encoding="utf-8"), feature_version=(3, 9))


if __name__ == "__main__":
    unittest.main()
