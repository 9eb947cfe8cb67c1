"""Processes meet before JAX waits for them; who is missing is named everywhere."""

import concurrent.futures
import socket
import time

import pytest

from kimi_jax import roll_call
from kimi_jax.errors import UserError
from tests.ports import free_port


def gather(*processes: tuple[int, int], timeout: float = 10.0):
    """What each (process, processes) got: None or an error; one thread each."""
    port = free_port()

    def one(process: int, processes: int):
        try:
            roll_call.gather(f"localhost:{port}", processes, process, timeout)
        except (roll_call.MissingError, UserError) as error:
            return error
        return None

    with concurrent.futures.ThreadPoolExecutor() as pool:
        return list(pool.map(lambda pair: one(*pair), processes))


def test_all_are_there_in_any_order():
    assert gather((2, 3), (0, 3), (1, 3)) == [None] * 3


def test_the_missing_are_named_in_every_process_within_the_limit():
    started = time.monotonic()
    found = gather((0, 4), (2, 4), timeout=1.0)
    assert time.monotonic() - started < 4.0
    assert [str(error) for error in found] == ["2 processes did not come: 1, 3"] * 2
    (found,) = gather((0, 2), timeout=0.2)
    assert str(found) == "process 1 did not come"


def test_without_a_coordinator_the_others_give_up():
    (found,) = gather((1, 2), timeout=0.2)
    assert isinstance(found, roll_call.MissingError)
    assert "did not answer" in str(found)


@pytest.mark.parametrize(
    ("processes", "words"),
    [
        (((0, 3), (1, 2)), "process 1 was told of 2 processes, process 0 of 3"),
        (((0, 3), (1, 3), (1, 3)), "two processes call themselves number 1"),
    ],
)
def test_processes_that_disagree_all_hear_why(processes, words):
    for error in gather(*processes):
        assert isinstance(error, UserError) and words in str(error)


def test_strangers_and_those_who_gave_up_do_not_count():
    port = free_port()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        leader = pool.submit(roll_call.gather, f"localhost:{port}", 3, 0, 10.0)
        for line in (b"GET / HTTP/1.1\r\n\r\n", b"\xff\n", b"kimi_jax 1 3\n"):
            while True:
                try:
                    peer = socket.create_connection(("localhost", port))
                    break
                except OSError:
                    time.sleep(0.01)
            with peer:
                peer.sendall(line)
                peer.shutdown(socket.SHUT_RDWR)
        time.sleep(0.1)
        late = pool.submit(roll_call.gather, f"localhost:{port}", 3, 2, 10.0)
        time.sleep(0.1)
        assert not leader.done() and not late.done()
        roll_call.gather(f"localhost:{port}", 3, 1, 10.0)
        assert leader.result() is late.result() is None


def test_a_port_in_use_is_an_error_at_once():
    with socket.create_server(("", 0)) as other:
        address = f"localhost:{other.getsockname()[1]}"
        with pytest.raises(UserError, match="end that, or set"):
            roll_call.gather(address, 2, 0, 10.0)
