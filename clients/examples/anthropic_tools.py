"""Anthropic's bash tool (bash_20250124) on a session, and results in the form of its code execution tool."""

import sbxrun


def bash(session: sbxrun.Session, tool_use):
    """Return the tool_result of a tool_use. Files persist between calls; the working directory and variables do not."""
    if tool_use["input"].get("restart"):
        return {"type": "tool_result", "tool_use_id": tool_use["id"], "content": "restarted"}
    report = session.exec(["bash", "-c", "--", tool_use["input"]["command"]], timeout=60)
    note = "\n(timed out)" if report.timed_out else ""
    return {"type": "tool_result", "tool_use_id": tool_use["id"], "content": report.stdout + report.stderr + note, "is_error": report.exit_code != 0}


def code_execution(session: sbxrun.Session, command):
    """Return the output. Files in out/ are stored, and the client's fetch reads them by their IDs."""
    report = session.exec(["bash", "-c", "--", command], timeout=60, collect=["out/*"])
    files = [{"type": "bash_code_execution_output", "file_id": file.id} for file in report.files if not file.error]
    return {"type": "bash_code_execution_result", "stdout": report.stdout, "stderr": report.stderr, "return_code": report.exit_code, "content": files}
