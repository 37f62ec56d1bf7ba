"""An executor for CodeAgent(executor=…) of smolagents: its code runs in the interpreter of a session. final_answer is its only tool."""

import json

import sbxrun
from smolagents.local_python_executor import CodeOutput, PythonExecutor


# An answer may be longer than the message of an exception, so it is passed in a file.
PRELUDE = """
import json, os
class FinalAnswer(BaseException): pass
def final_answer(answer, path=os.path.abspath(".answer.json")):
    with open(path, "w") as file:
        json.dump(answer, file)
    raise FinalAnswer
"""


class SbxrunExecutor(PythonExecutor):
    def __init__(self, session: sbxrun.Session) -> None:
        self.session = session
        self(PRELUDE)

    def send_tools(self, tools) -> None:
        if set(tools) - {"final_answer"}:
            raise ValueError("tools run in this process, but the code runs in the sandbox")

    def send_variables(self, variables) -> None:
        self(f"globals().update(json.loads({json.dumps(variables)!r}))")

    def __call__(self, code_action: str) -> CodeOutput:
        cell = self.session.cell(code_action, timeout=60)
        if cell.exception and cell.exception["name"] == "FinalAnswer":
            return CodeOutput(output=json.loads(self.session.read(".answer.json")), logs=cell.stdout, is_final_answer=True)
        if cell.cause != "done" or cell.exception:
            raise RuntimeError(cell.exception["traceback"] if cell.exception else f"the code was ended: {cell.cause}")
        return CodeOutput(output=cell.value, logs=cell.stdout, is_final_answer=False)
