"""Runs scripts in processes that have SGLang imported already: importing costs 20 s, a fork none.

One JSON request per line on stdin, one JSON answer per line on stdout. A request is
``{"script", "environ", "path", "argv", "cwd"}``. Each script runs as ``__main__`` of a fork of its
own; the answer holds that process's exit code and all that it wrote to stdout and stderr.
"""

import json
import os
import sys
import tempfile
import traceback


def _child(request: dict) -> int:
    """Run the script; the exit code that an interpreter running it would end with."""
    sys.path[:0] = request["path"]
    os.environ.update(request["environ"])
    os.chdir(request["cwd"])
    sys.argv[:] = request["argv"]
    code = 0
    try:
        exec(compile(request["script"], "<test script>", "exec"), {"__name__": "__main__"})
    except SystemExit as error:
        code = 0 if error.code is None else error.code
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def serve(answers) -> None:
    """Answer requests until stdin ends."""
    for line in sys.stdin:
        request = json.loads(line)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            pid = os.fork()
            if pid == 0:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                # Tearing down an interpreter with SGLang in it takes seconds.
                os._exit(_child(request))
            _, status = os.waitpid(pid, 0)
            answer = {"rc": os.waitstatus_to_exitcode(status)}
            for name, file in (("stdout", out), ("stderr", err)):
                file.seek(0)
                answer[name] = file.read().decode(errors="replace")
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import sglang.srt.entrypoints.engine  # noqa: F401
    import sglang.srt.layers.attention.deepseek_v4_backend_hip_radix  # noqa: F401
    import sglang.srt.managers.scheduler  # noqa: F401
    import sglang.srt.models.deepseek_v4  # noqa: F401

    channel.write("ready\n")
    channel.flush()
    serve(channel)
    os._exit(0)
