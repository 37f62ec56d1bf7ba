"""An agent's loop over MCP, using only the standard library. The model is a function; replace it with a real one."""

import json
import subprocess


class Tools:
    """The tools of `sbxrun mcp`, over JSON-RPC on its stdin and stdout."""

    def __init__(self, command=("sbxrun", "mcp")):
        self.server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.asked = 0
        self.ask("initialize", {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "agent", "version": "1"}})
        self.send({"method": "notifications/initialized"})
        self.tools = self.ask("tools/list", {})["tools"]

    def send(self, message):
        self.server.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        self.server.stdin.flush()

    def ask(self, method, params):
        self.asked += 1
        self.send({"id": self.asked, "method": method, "params": params})
        for line in self.server.stdout:
            answer = json.loads(line)
            if answer.get("id") == self.asked:
                if "error" in answer:
                    raise RuntimeError(answer["error"]["message"])
                return answer["result"]
        raise RuntimeError("the server has ended")

    def call(self, name, arguments):
        return self.ask("tools/call", {"name": name, "arguments": arguments})

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with self.server:  # closes its stdin, which makes it end everything that runs, and waits
            pass


def run(model, task, tools):
    """Query the model until it has an answer, and call the tools that it requests."""
    messages = [{"role": "user", "content": task}]
    while True:
        reply = model(messages, tools.tools)
        messages.append({"role": "assistant", **reply})
        if "tool" not in reply:
            return reply["content"]
        result = tools.call(reply["tool"], reply["arguments"])
        text = "".join(part["text"] for part in result["content"] if part["type"] == "text")
        messages.append({"role": "tool", "content": text, "report": result.get("_meta", {}).get("sbxrun/report")})


def stub_model(messages, tools):
    """A model that can only run Python."""
    if messages[-1]["role"] == "user":
        return {"tool": "run_code", "arguments": {"code": "print(sum(range(101)))"}}
    return {"content": "The sum is " + messages[-1]["report"]["stdout"].strip()}


if __name__ == "__main__":
    with Tools() as tools:
        print(run(stub_model, "What is the sum of the numbers to 100?", tools))
