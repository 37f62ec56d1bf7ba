"""A tool for LangChain: Python, in a fresh sandbox each time."""

import os

import sbxrun
from langchain_core.tools import tool

client = sbxrun.Client(os.environ.get("SBXRUN_ADDRESS", "unix:/run/sbxrund.sock"))


@tool
def run_python(code: str) -> str:
    """Run a Python program and return its output."""
    report = client.run(code=code, timeout=30)
    return f"{report.stdout}{report.stderr}\n({report.cause}, exit code {report.exit_code})"
