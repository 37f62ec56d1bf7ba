"""OpenAI's shell tool: the shell_call_output of a shell_call."""

import sbxrun


def shell(session: sbxrun.Session, call):
    action, output = call["action"], []
    most = action.get("max_output_length") or 65536
    for command in action["commands"]:
        report = session.exec(["bash", "-c", "--", command], timeout=(action.get("timeout_ms") or 60_000) / 1000, limits={"max_output": most})
        outcome = {"type": "timeout"} if report.timed_out else {"type": "exit", "exit_code": report.exit_code}
        output.append({"stdout": report.stdout, "stderr": report.stderr, "outcome": outcome})
    return {"type": "shell_call_output", "call_id": call["call_id"], "max_output_length": most, "output": output}
