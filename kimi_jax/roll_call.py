"""All processes of a run say that they are there, before JAX waits for them.

JAX's own start ends in an abort without an exception when a process is missing, and
names none. So the processes first meet on the same address with plain sockets: process
0 listens, the others report, and when all are there, or the time is up, everyone is
told. A missing process is then named in an ordinary error, in every process.

Each sends one line, "kimi_jax PROCESS PROCESSES", and reads one: "go", or the reason
why not.
"""

from __future__ import annotations

import contextlib
import socket
import time

from kimi_jax.errors import UserError

_WORD = "kimi_jax"
_RETRY_SECONDS = 0.5
# For a peer that connected to say its line, and for the verdict to arrive.
_LINE_SECONDS = 5.0
_NAMED = 20


class MissingError(Exception):
    """Not all came; the message says who, as far as this process can know."""


def gather(coordinator: str, processes: int, process: int, timeout: float) -> None:
    """Returns in every process when all of them have called this.

    Args:
      coordinator: HOST:PORT, at which process 0 listens.
      timeout: seconds; the error comes at most a few later.

    Raises:
      MissingError: somebody did not come, or the coordinator cannot be reached.
      UserError: the port is taken, or two processes disagree about who they are.
    """
    host, _, port = coordinator.rpartition(":")
    deadline = time.monotonic() + timeout
    if process == 0:
        _listen(int(port), processes, deadline)
    else:
        _report(host.strip("[]"), int(port), processes, process, deadline)


def _listen(port: int, processes: int, deadline: float) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_server(port, processes))
        peers: list[socket.socket] = []
        present: dict[int, socket.socket] = {}
        verdict = "go"
        while verdict == "go" and (absent := _absent(present, processes)):
            server.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                peers.append(stack.enter_context(server.accept()[0]))
            except TimeoutError:
                verdict = "absent " + " ".join(map(str, absent))
                break
            words = _read_line(peers[-1]).split()
            if len(words) == 3 and words[0] == _WORD and words[1].isdigit():
                verdict = _refusal(words, processes, present)
                present[int(words[1])] = peers[-1]
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.sendall(f"{verdict}\n".encode())
    _judge(verdict)


def _absent(present: dict[int, socket.socket], processes: int) -> list[int]:
    """Who is missing; forgets those that have given up."""
    if len(present) == processes - 1:
        for number in [n for n, peer in present.items() if _gone(peer)]:
            del present[number]
    return [n for n in range(1, processes) if n not in present]


def _gone(peer: socket.socket) -> bool:
    peer.settimeout(0)
    try:
        return not peer.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _server(port: int, processes: int) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(
            ("", port), family=family, dualstack_ipv6=both, backlog=processes
        )
    except OSError as error:
        raise UserError(
            f"port {port} of this machine cannot be used: {error.strerror}; another "
            "run may hold it: end that, or set --config.cluster.coordinator=HOST:PORT "
            "with a free port, the same in every process"
        ) from error


def _refusal(
    words: list[str], processes: int, present: dict[int, socket.socket]
) -> str:
    """Why a caller does not fit, or "go"."""
    if words[2] != str(processes):
        return (
            f"refused process {words[1]} was told of {words[2]} processes, process 0 "
            f"of {processes}"
        )
    number = int(words[1])
    if number == 0 or (number in present and not _gone(present[number])):
        return f"refused two processes call themselves number {number}"
    return "go"


def _report(
    host: str, port: int, processes: int, process: int, deadline: float
) -> None:
    problem = "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=left) as peer:
                peer.sendall(f"{_WORD} {process} {processes}\n".encode())
                # Process 0 speaks at its own deadline, which may be a little later.
                line = _read_line(peer, left + _LINE_SECONDS)
                if line:
                    _judge(line)
                    return
                problem = "the connection was closed"
        except OSError as error:
            problem = error.strerror or str(error)
        time.sleep(_RETRY_SECONDS)
    raise MissingError(f"process 0 at {host}:{port} did not answer ({problem})")


def _read_line(peer: socket.socket, timeout: float = _LINE_SECONDS) -> str:
    """One line, or "" if it does not come."""
    peer.settimeout(timeout)
    line = b""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        while not line.endswith(b"\n") and len(line) < 65536:
            more = peer.recv(4096)
            if not more:
                return ""
            line += more
        return line.decode().strip()
    return ""


def _judge(verdict: str) -> None:
    kind, _, rest = verdict.partition(" ")
    if kind == "absent":
        absent = rest.split()
        names = ", ".join(absent[:_NAMED]) + (", ..." if absent[_NAMED:] else "")
        raise MissingError(
            f"process {names} did not come"
            if len(absent) == 1
            else f"{len(absent)} processes did not come: {names}"
        )
    if kind != "go":
        raise UserError(
            f"the processes disagree: {rest}; start each with the same "
            "--config.cluster.processes and its own --config.cluster.process, and no "
            "other run on this port"
        )
