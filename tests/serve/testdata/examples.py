"""Runs the examples for Python. SBXRUN_ADDRESS is a server, SBXRUN_BIN the command."""

import http.client
import json
import os
import threading
import unittest
import unittest.mock
from http.server import ThreadingHTTPServer

import anthropic_tools
import langchain_tool
import mcp_agent
import openai_shell
import sbxrun
import service
import smolagents_executor


class Examples(unittest.TestCase):
    def setUp(self):
        self.client = sbxrun.Client(os.environ["SBXRUN_ADDRESS"])
        self.session = self.client.session()
        self.addCleanup(self.session.end)

    def test_anthropic(self):
        def bash(**given):
            return anthropic_tools.bash(self.session, {"type": "tool_use", "id": "t1", "name": "bash", "input": given})

        self.assertEqual(bash(command="echo 42 >a; cat a"), {"type": "tool_result", "tool_use_id": "t1", "content": "42\n", "is_error": False})
        self.assertEqual(bash(command="cat a none")["is_error"], True)
        self.assertEqual(bash(restart=True)["content"], "restarted")
        result = anthropic_tools.code_execution(self.session, "mkdir out; cp a out; exit 3")
        self.assertEqual((result["type"], result["return_code"], result["stdout"]), ("bash_code_execution_result", 3, ""))
        self.assertEqual(self.client.fetch(result["content"][0]["file_id"]), b"42\n")

    def test_openai(self):
        call = {"type": "shell_call", "call_id": "c1", "action": {"commands": ["echo a; exit 3", "sleep 1000"], "timeout_ms": 700, "max_output_length": 4096}}
        answer = openai_shell.shell(self.session, call)
        self.assertEqual((answer["type"], answer["call_id"], answer["max_output_length"]), ("shell_call_output", "c1", 4096))
        self.assertEqual(answer["output"][1]["outcome"], {"type": "timeout"})
        call["action"] = {"commands": ["echo a; exit 3"]}
        self.assertEqual(openai_shell.shell(self.session, call)["output"], [{"stdout": "a\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 3}}])

    def test_langchain(self):
        self.assertEqual(langchain_tool.run_python.name, "run_python")
        self.assertEqual(langchain_tool.run_python.invoke({"code": "print(6*7)"}), "42\n\n(exited, exit code 0)")

    def test_smolagents(self):
        run = smolagents_executor.SbxrunExecutor(self.session)
        run.send_tools({"final_answer": None})
        run.send_variables({"x": [6, 7]})
        self.assertEqual(run("print('hm')\ny = x[0] * x[1]\ny").logs, "hm\n")
        self.assertEqual(run("y").output, "42")
        with self.assertRaisesRegex(RuntimeError, "ZeroDivisionError"):
            run("1/0")
        final = run("try:\n    final_answer({'sum': y})\nexcept Exception:\n    pass")
        self.assertEqual((final.output, final.is_final_answer), ({"sum": 42}, True))
        long = run("final_answer('\u00e4' * 100_000)")
        self.assertEqual((long.output, long.is_final_answer), ("\u00e4" * 100_000, True))

    def test_service(self):
        server = ThreadingHTTPServer(("127.0.0.1", 0), service.Handler)
        self.addCleanup(server.server_close)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        self.addCleanup(thread.join)
        self.addCleanup(server.shutdown)

        def post(document):
            connection = http.client.HTTPConnection(*server.server_address)
            connection.request("POST", "/execute", json.dumps(document))
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

        self.assertEqual(post({"code": "print(6*7)"}), (200, {"cause": "exited", "exit_code": 0, "stdout": "42\n", "stderr": ""}))
        self.assertEqual(post({"code": "while True: pass", "timeout": 0.3})[1]["cause"], "timeout")
        self.assertEqual(post({})[0], 400)
        with unittest.mock.patch.object(service, "client", sbxrun.Client("unix:/no/such/socket")):
            self.assertEqual(post({"code": "1"})[0], 502)

    def test_agent(self):
        with mcp_agent.Tools((os.environ["SBXRUN_BIN"], "mcp")) as tools:
            self.assertEqual(mcp_agent.run(mcp_agent.stub_model, "sum", tools), "The sum is 5050")
        self.assertEqual(tools.server.returncode, 0)


if __name__ == "__main__":
    unittest.main()
