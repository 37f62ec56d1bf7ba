"""As much of smolagents.local_python_executor as the example uses."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any


@dataclass
class CodeOutput:
    output: Any
    logs: str
    is_final_answer: bool


class PythonExecutor(ABC):
    @abstractmethod
    def send_tools(self, tools): ...

    @abstractmethod
    def send_variables(self, variables): ...

    @abstractmethod
    def __call__(self, code_action): ...
