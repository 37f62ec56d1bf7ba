"""A service that runs the code it receives, using only the standard library: POST /execute {"code": "print(6*7)"}."""

import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import sbxrun

client = sbxrun.Client(os.environ.get("SBXRUN_ADDRESS", "unix:/run/sbxrund.sock"))


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        try:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            report = client.run(code=asked["code"], timeout=min(asked.get("timeout", 10), 60))
        except (ValueError, KeyError, TypeError) as e:
            return self.answer(400, {"error": f"invalid request: {e}"})
        except sbxrun.Refused as e:  # nothing has run
            wrong = 400 <= e.status < 500
            return self.answer(503 if e.again is not None else 400 if wrong else 502, {"error": str(e)})
        except sbxrun.Error as e:
            return self.answer(502, {"error": str(e)})
        self.answer(200, {"cause": report.cause, "exit_code": report.exit_code, "stdout": report.stdout, "stderr": report.stderr})

    def answer(self, status, document):
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
