"""As much of langchain_core.tools as the example uses."""

import inspect


class StructuredTool:
    def __init__(self, function):
        self.function, self.name, self.description = function, function.__name__, inspect.getdoc(function)
        self.args = {name: p.annotation for name, p in inspect.signature(function).parameters.items()}
        if not self.description or inspect.Parameter.empty in self.args.values():
            raise ValueError("a tool has a docstring and types")

    def invoke(self, arguments):
        return self.function(**arguments)


tool = StructuredTool
