"""The program of a worker process: imports one reward function and answers calls until its end.

Started as a script, so that it pays for nothing but the reward's own module: no torch, no vLLM, no
process group. It reads frames (8 bytes of length, then a pickle of ours) from stdin and answers
each with a line of JSON: nothing that comes back is ever unpickled. What the function prints goes
to stderr. It dies with the process that started it.
"""

import ctypes
import json
import os
import pickle
import signal
import sys
from typing import IO, Any

_PR_SET_PDEATHSIG = 1
_LONGEST = 20_000  # characters of a traceback that travel


def read_frame(source: IO[bytes]) -> Any:
    """The next object; raises EOFError when the other side is gone."""
    head = source.read(8)
    if len(head) < 8:
        raise EOFError
    return pickle.loads(source.read(int.from_bytes(head, "big")))


def frame(value: Any) -> bytes:
    """An object as `read_frame` reads it."""
    body = pickle.dumps(value)
    return len(body).to_bytes(8, "big") + body


def main() -> None:
    """Serve: first frame (module path list, reward path), then (number, arguments, completions)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    calls, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.path[:], path = read_frame(calls)
    from megagrpo.rewards.base import load_reward
    from megagrpo.rewards.calls import attempt

    function, born = load_reward(path), os.getpid()
    _reply(replies, "ready")
    while True:
        try:
            number, arguments, size = read_frame(calls)
        except EOFError:
            return
        found = attempt(function, arguments, size)
        if os.getpid() != born:
            os._exit(0)  # a fork of the function's that came back: only one may answer
        _reply(replies, [number, found[-_LONGEST:] if isinstance(found, str) else found])


def _reply(replies: IO[str], value: Any) -> None:
    replies.write(json.dumps(value) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
