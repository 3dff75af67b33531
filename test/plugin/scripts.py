"""What the scripts run in forked processes have in common."""

ON = {"SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE": "1"}
LOAD = "from sglang.srt.plugins import load_plugins; load_plugins()\n"

# A function of ours and the module it lives in, broken in ways an upstream edit would.
BREAK = """
import inspect, linecache, textwrap
import sglang.srt.arg_groups.arg_utils as arg_utils
import sglang.srt.server_args as server_args

def rewrite(owner, name, old, new):
    # The file's text changes, and the function is compiled from it at its own place.
    function = getattr(owner, name)
    file, line = function.__code__.co_filename, function.__code__.co_firstlineno
    source = inspect.getsource(function)
    assert old in source
    lines = linecache.getlines(file)
    changed = source.replace(old, new).splitlines(True)
    lines = lines[: line - 1] + changed + lines[line - 1 + len(source.splitlines()) :]
    linecache.cache[file] = (1, None, lines, file)
    text = "\\n" * (line - 1) + textwrap.dedent("".join(changed))
    scope = {}
    exec(compile(text, file, "exec"), function.__globals__, scope)
    setattr(owner, name, scope[name])
"""

INERT = f"{['sglang_unified_kv', 'sglang_unified_kv.names', 'sglang_unified_kv.plugin']}\n"
"""What is loaded of ours with every switch off, as a script prints it."""
